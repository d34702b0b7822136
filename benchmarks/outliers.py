"""Do outliers appear on their own, and does Smooth-SwiGLU keep them out of FP8? One small SwiGLU network.

    python benchmarks/outliers.py              # 10 minutes of CPU time; run it again to continue
    python benchmarks/outliers.py --report     # the tables and the figure of what has been run

Fishman et al. 2024 (arXiv:2409.12517, theorem 1): where the loss has an ℓ2 term and the gate of a SwiGLU
is saturated, a stationary point has gate and up weights that are equal or opposite. Their product is then
quadratic in its input, and delayed FP8 scales, which come from earlier steps, are too small for it.

Here a residual block without attention, x + down(silu(gate(x)) * up(x)), learns a network that has no
product in it: 512 random GELUs. Inputs have 16 dims and log-normal sizes (σ 0.5); each step has 64 new
ones. The loss is the squared error of the output, relative to the square of `SIZE`, the size of the
targets, plus half of `Setting.l2` times the squared norm of all weights. Adam brings it to a stationary
point: its rate falls linearly to 0. Nothing is aligned or enlarged by hand. The control has GELUs instead,
half as many again, so that it has as many weights.

    cosine       |cos| of gate and up weights of a channel; "longest" is the channel with the largest
                 product of the two norms, "mean" is weighted by these products
    product      the largest input of the down projection in a window of `WINDOW` steps
    saturated    share of the elements of that input beyond the largest number of E4M3, counted at every
                 step (`maxlp.precision.health`)
    error        squared error on 4,096 new inputs, relative to that of predicting 0

Criteria, written before the runs, to hold with each of `SEEDS`:

1. Unforced alignment: without quantization the mean cosine is below 0.5 at first and above 0.9 in the end,
   as is the longest's in the end; without ℓ2 the mean is lower in the end.
2. The product grows: in the end it is 5 times as large as in the first window, and 4 times as large as
   the control's.
3. Delayed FP8 saturates after the alignment: more than one element in 100,000 in some window, the first
   of which is not before the mean cosine is 0.9; and over the second half of the run at least twice as
   often as the control.
4. This costs: the error with delayed FP8 is more than 5 % above that without quantization. Smooth-SwiGLU
   (`channel`) cures it: nothing saturates, and the error is at most 1 % above.

What trials with seed 0 (4,000 steps) had shown by then: cosines of 0.99; with targets from a SwiGLU
network, or with the second of two blocks, often no alignment; with inputs of equal size hardly any
saturation, with these about one element in 100,000, four times the control's; and no loss from it.
"""
