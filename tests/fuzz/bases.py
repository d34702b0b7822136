"""Valid inputs, made once by the commands themselves; every bad input is a change of one of them.

In the folder of a case: ``llama.py`` and ``clip.py`` are configs, ``run`` and ``run_clip`` what they
trained, ``imported`` a run of imported weights, ``hf_llama`` … folders of other libraries, ``corpus``,
``docs.jsonl``, ``docs.parquet``, ``pictures``, ``tfds`` and ``prepared…`` data; ``spm.model`` is a
SentencePiece tokenizer.
"""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.commands import Command, run_one

GOLDENS = Path(__file__).parent.parent / "goldens"

LLAMA = '''"""A Llama of two blocks."""

from maxlp.families.llama.presets import llama


def get_config(arg=""):
    c = llama(
        vocab_size=300,
        embed_dim=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=64,
        max_seq_len=64,
        rope_theta=10000.0,
        dtype="float32",
        remat="none",
    )
    c.precision.first_blocks = c.precision.last_blocks = 0
    c.data.source = "text:corpus?validation=0.2"
    c.data.tokenizer = "tokenizer.json"
    c.data.seq_len = 32
    c.data.batch_size = 4
    c.data.shuffle_tokens = 256
    c.loss.num_chunks = 1
    c.optimizer.warmup_steps = 1
    c.train.total_steps = 4
    c.train.log_every = 1
    c.train.eval_every = 0
    c.train.eval_batches = 1
    c.checkpoint.every_steps = 2
    c.metrics.tensorboard = False
    # changes
    return c
'''
CLIP = '''"""A CLIP of one block in each tower."""

from maxlp.families.clip.presets import clip


def get_config(arg=""):
    tower = dict(width=32, num_layers=1, num_heads=2, mlp_dim=64)
    c = clip(
        embed_dim=16,
        visual=dict(image_size=16, patch_size=8, pool="gap", **tower),
        text=dict(vocab_size=300, max_len=16, pool="eos", eos_id=1, **tower),
        dtype="float32",
        remat="none",
    )
    c.precision.first_blocks = c.precision.last_blocks = 0
    c.data.source = "tar:pictures/pictures.tar?validation=0.25"
    c.data.classes = "pictures/classes.txt"
    c.data.tokenizer = "tokenizer.json"
    c.data.image_size = 16
    c.data.text_len = 16
    c.data.templates = ("{}",)
    c.data.batch_size = 8
    c.data.max_broken = 0
    c.loss.method = "plain"
    c.optimizer.warmup_steps = 1
    c.train.total_steps = 2
    c.train.log_every = 1
    c.train.eval_every = 0
    c.train.eval_batches = 1
    c.checkpoint.every_steps = 2
    c.metrics.tensorboard = False
    # changes
    return c
'''
TEXT = "the tortoise and the hare went to the market and bought {} apples for {} pennies each. "
MAKE = (
    Command("train", ("--config=llama.py", "--workdir=run")),
    Command("train", ("--config=clip.py", "--workdir=run_clip")),
    Command("convert", ("export", "--workdir=run", "--output=hf_llama")),
    Command("convert", ("import", "--input=hf_llama", "--output=imported")),
    Command("prepare", ("text", "--source=text:corpus", "--output=prepared_text", "--shards=2")),
    Command(
        "prepare",
        (
            "text",
            "--source=text:corpus",
            "--output=prepared_ids",
            "--tokenizer=tokenizer.json",
            "--shards=2",
        ),
    ),
    Command("prepare", ("image_text", "--source=tar:pictures", "--output=prepared_images", "--shards=2")),
)
# A valid command for each kind of input: it must be accepted, or refusals of its mutations mean nothing.
CONTROLS = (
    Command("train", ("--config=llama.py", "--workdir=new", "--dry_run")),
    Command("train", ("--config=clip.py", "--workdir=new", "--dry_run")),
    Command("train", ("--config=llama.py", "--workdir=run")),
    Command("plan", ("--config=llama.py", "--topology=v5p:2x2x1", "--estimate_only", "--json=plan.json")),
    Command("plan", ("--config=clip.py", "--topology=v5p:2x2x1", "--estimate_only")),
    Command("evaluate", ("--workdir=run",)),
    Command("evaluate", ("--workdir=imported", "--config=llama.py")),
    Command("evaluate", ("--workdir=run_clip", "--linear_probe")),
    Command("generate", ("--workdir=run", "--prompt=the hare", "--max_new_tokens=4")),
    Command("report", ("run",)),
    Command("convert", ("import", "--input=hf_clip", "--output=out1")),
    Command("convert", ("import", "--input=hf_siglip", "--output=out2")),
    Command("convert", ("import", "--input=open_clip", "--output=out3")),
    Command("convert", ("import", "--input=sharded", "--output=out4")),
    *(
        Command(
            "train",
            ("--config=llama.py", f"--workdir=new{i}", f"--config.data.source={source}?validation=0.2"),
        )
        for i, source in enumerate(
            ("jsonl:docs.jsonl", "parquet:docs.parquet", "array_record:prepared_ids")
        )
    ),
    Command("prepare", ("text", "--source=tfds:toy_text?text_key=body&data_dir=tfds", "--output=out5")),
    Command("prepare", ("text", "--source=text:corpus", "--tokenizer=spm.model", "--output=out6")),
    Command("train", ("--config=llama.py", "--workdir=new9", "--config.data.tokenizer=spm.model")),
)


def make(folder: Path) -> None:
    """Makes all valid inputs in a folder."""
    from maxlp.data.tokenizers.training import train_bpe

    folder.mkdir(parents=True)
    (folder / "llama.py").write_text(LLAMA)
    (folder / "clip.py").write_text(CLIP)
    texts = [TEXT.format(i, i * i) * 20 for i in range(40)]
    for name, content in train_bpe(texts, 300).files.items():
        (folder / name).write_bytes(content)
    (folder / "corpus").mkdir()
    for i, text in enumerate(texts):
        (folder / "corpus" / f"{i}.txt").write_text(text)
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _write_parquet(folder / "docs.parquet", texts)
    _write_pictures(folder / "pictures")
    _write_sentencepiece(folder / "spm.model", texts)
    # In a process of its own, because TFDS leaves threads behind, and this one forks.
    program = "import sys; from tests.data.corpora import write_tfds; write_tfds('tfds', sys.argv[1:])"
    command = [sys.executable, "-c", program, *(text[:500] for text in texts)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    _write_models(folder)
    for command in MAKE:
        _expect_success(command, folder)


def check(folder: Path) -> None:
    """Runs the `CONTROLS` in a copy of the valid inputs."""
    copy = folder.parent / "controls" / "box"
    shutil.copytree(folder, copy)
    for command in CONTROLS:
        _expect_success(command, copy)


def _expect_success(command: Command, folder: Path) -> None:
    done = run_one(command, folder)
    assert done.code == 0, f"{command} ended with {done.code}: {done.out[-500:]}{done.err[-2000:]}"


def _write_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10, compression="none")


def _write_sentencepiece(path: Path, texts: list[str]) -> None:
    import sentencepiece

    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=300,
            byte_fallback=True,
            minloglevel=2,
        )


def _write_pictures(folder: Path) -> None:
    """A WebDataset of three shades, with captions and classes."""
    folder.mkdir()
    names, rng = ("black", "gray", "white"), np.random.default_rng(0)
    (folder / "classes.txt").write_text("\n".join(names) + "\n")
    with tarfile.open(folder / "pictures.tar", "w") as tar:
        for i in range(40):
            pixels, image = np.uint8(100 * (i % 3) + rng.integers(0, 50, (20, 24, 3))), io.BytesIO()
            kind = ("png", "jpg", "webp")[i % 3]
            Image.fromarray(pixels).save(image, {"jpg": "JPEG"}.get(kind, kind))
            parts = {kind: image.getvalue(), "cls": b"%d" % (i % 3), "txt": names[i % 3].encode()}
            for kind, data in parts.items():
                member = tarfile.TarInfo(f"{i:03d}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _write_models(folder: Path) -> None:
    """Folders of weights as other libraries write them, from the goldens."""
    from maxlp.families.weights import formats
    from maxlp.runtime.safetensors import write_tensors

    for name, golden, family, key, shard in (
        ("sharded", "llama_3_1", "llama", "hf_llama", 30_000),
        ("hf_clip", "clip_hf_quick_gelu", "clip", "hf_clip", 10**9),
        ("hf_siglip", "clip_hf_siglip", "clip", "hf_clip", 10**9),
        ("open_clip", "clip_open_clip", "clip", "open_clip", 10**9),
    ):
        chosen = formats(family)[key]
        with np.load(GOLDENS / f"{golden}.npz") as file:
            config = json.loads(str(file["config"]))
            found = [each for each in file if each.startswith("weights/")]
            tensors = {each.removeprefix("weights/"): file[each].astype(np.float32) for each in found}
        write_tensors(
            folder / name, tensors, dtype="float32", weights=chosen.weights_file, max_shard_bytes=shard
        )
        (folder / name / chosen.config_file).write_text(json.dumps(config))
    statistics = dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.25, 0.25, 0.25])
    (folder / "hf_clip" / "preprocessor_config.json").write_text(json.dumps(statistics))
