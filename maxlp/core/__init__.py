"""Training itself: the state, the gradients of a batch, the step that joins them with an optimizer."""
