"""`hpctrain eval` and `hpctrain sample` on any grid, of runs and of Hugging Face's folders, against transformers."""

import gc
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trained_here import trainer_in
from training_checks import every

from hpctrain.cli import main
from hpctrain.data import ShardedTokens, pack
from hpctrain.data.documents import Fields
from hpctrain.train.generate import chosen_by

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

CONTEXT = 24
COMMON = [
    "model.layers=4", "model.heads=4", "model.width=24", f"model.context={CONTEXT}", "train.batch=8", "train.lr=1e-2",
    "train.warmup=1", "run.steps=3", "run.eval_batches=1", "run.checkpoint_minutes=0", "comm.watchdog=60",
    "run.checkpoint_every=2", "checkpoint.background=false", "precision.compute=fp64", "model.tied=false",
]  # fmt: skip
KINDS = {"gpt2": ["model.vocabulary=257"], "llama": ["model.kind=llama", "model.vocabulary=257", "model.kv_heads=2"]}
PROMPT = "7 times"


@pytest.fixture(scope="module", params=[pytest.param("gpt2", marks=pytest.mark.ranks(1, 2)), "llama"])
def run(request, world, tmp_path_factory):
    """A trained run, and its weights in transformers on rank 0. It begins with large weights, so that its text is not
    one letter again and again, which hides a wrong position."""
    folder = world.bcast(tmp_path_factory.mktemp("run") if world.rank == 0 else None)
    if world.rank == 0:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(large_weights(request.param)).save_pretrained(folder / "first")
    world.barrier()
    options = [*COMMON, *KINDS[request.param], f"grid.data={world.size}", f"model.init={folder / 'first'}"]
    train = trainer_in(world, folder, options)
    assert train() == 0
    theirs = None
    if world.rank == 0:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(train.folder / "run/model", dtype=torch.float64).eval()
    return train.folder / "run", theirs


def large_weights(kind):
    """What transformers calls the model of COMMON and KINDS."""
    from transformers import GPT2Config, LlamaConfig

    common = {"vocab_size": 257, "initializer_range": 0.4, "tie_word_embeddings": False}
    if kind == "gpt2":
        sizes = {"n_positions": CONTEXT, "n_embd": 24, "n_layer": 4, "n_head": 4}
        return GPT2Config(**common, **sizes)
    sizes = {"hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5}
    return LlamaConfig(**common, **sizes)


def said(world, capfd, *command):
    """What rank 0 prints."""
    world.barrier()
    capfd.readouterr()
    assert main([str(word) for word in command]) == 0
    gc.collect()
    world.barrier()
    return capfd.readouterr().out


GRIDS = {
    1: [["grid.data=1"]],
    2: [["grid.pipeline=2"], ["grid.tensor=[1, 2, 1]"], ["grid.data=2"], ["grid.data=[1, 2, 1]"]],
    4: [["grid.pipeline=2", "grid.tensor=2"], ["grid.data=2", "grid.tensor=[1, 1, 2]"], ["grid.data=[1, 2, 2]"]],
}


def grids(ranks):
    return GRIDS[ranks]


def test_greedy_text_is_that_of_transformers(world, run, capfd):
    """From a run and from its export; the tokenizer beside it is the same."""
    folder, theirs = run
    count = CONTEXT - len(PROMPT)
    expected = ""
    if world.rank == 0:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        assert ids.tolist() == [list(PROMPT.encode())]
        assert tokenizer("größer í €\n").input_ids == list("größer í €\n".encode())
        with torch.no_grad():
            found = theirs.generate(ids, do_sample=False, max_new_tokens=count)
        expected = tokenizer.decode(found[0], skip_special_tokens=True) + "\n"
    command = ["sample", folder, "--prompt", PROMPT, "--temperature", 0, "--tokens", count]
    for grid in grids(world.size):
        found = said(world, capfd, *command, *grid)
        assert world.rank or found == expected, grid
    command[1] = folder / "model"
    found = said(world, capfd, *command, *grids(world.size)[0], "precision.compute=fp64")
    assert world.rank or found == expected


def test_text_of_documents_that_see_themselves_alone(world, run, capfd):
    """After the end of a document, the next one's first word is all that its second sees."""
    folder, theirs = run
    words = []
    if world.rank == 0:
        seen = [256]
        for _ in range(9):
            with torch.no_grad():
                words.append(int(theirs(torch.tensor([seen])).logits[0, -1].argmax()))
            seen = list(words)
    for grid in grids(world.size):
        found = said(world, capfd, "sample", folder, "--temperature", 0, "--tokens", 9, "data.documents=masked", *grid)
        if world.rank == 0:
            until = words.index(256) if 256 in words else 9
            assert found == bytes(words[:until]).decode(errors="replace") + "\n", grid


def test_warm_text_is_the_same_on_every_grid(world, run, capfd):
    """Also where it grows longer than the context."""
    folder, _ = run
    command = ["sample", folder, "--tokens", CONTEXT + 8, "--top-k", 20, "--top-p", 0.9, "--seed", 5]
    texts = {said(world, capfd, *command, *grid) for grid in grids(world.size)}
    assert len(texts) == 1


@pytest.fixture
def data(world, tmp_path):
    """Packed documents, some with prompts; shorter and longer than the context, and one of nothing but its end."""
    folder = world.bcast(tmp_path)
    if world.rank == 0:
        import json

        texts = [("", "7 times 7 is 49\n"), ("what is more? ", "ä" * 40), ("q", "x"), ("", "and so on " * 9)]
        lines = [json.dumps({"q": q or " ", "a": a}) for q, a in texts]
        (folder / "d.jsonl").write_text("\n".join(lines))
        pack([str(folder / "d.jsonl")], folder / "d.h5", fields=Fields("a", "q"))
        pack([str(folder / "d.jsonl")], folder / "without-prompts.h5", fields=Fields("a"))
    world.barrier()
    return folder / "d.h5"


def by_hand(theirs, path, documents, masked):
    """(loss, tokens, bytes) of each part by transformers: every token once, from those before it in its window, and in
    its document where these are masked, whose first counts nowhere."""
    tokens = ShardedTokens(path)
    stored = tokens.read(0, tokens.tokens)
    ends = [0, *(i + 1 for i, token in enumerate(stored.tolist()) if token == 256)]
    parts = list(zip(ends, ends[1:])) if documents else [(0, len(stored))]
    found = []
    for start, stop in parts:
        total, count = 0.0, 0
        for first in range(start, stop, CONTEXT):
            last = min(first + CONTEXT, stop)
            before = 256 if first == 0 else int(stored[first - 1]) % 257
            ids = torch.tensor([before, *(int(t) % 257 for t in stored[first : last - 1])])
            targets = torch.tensor([int(t) if t < 257 else -100 for t in stored[first:last]])
            if masked:
                targets[ids == 256] = -100
            ends = [i + 1 for i, token in enumerate(ids.tolist()) if masked and token == 256]
            with torch.no_grad():
                pieces = [theirs(piece[None]).logits[0] for piece in ids.tensor_split(ends) if len(piece)]
            logits = torch.cat(pieces)
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets >= 0).sum())
        uncounted = [i for i in range(start, stop) if masked and (i == 0 or stored[i - 1] == 256)]
        part = np.delete(stored, [*range(start), *uncounted, *range(stop, len(stored))])
        found.append((total, count, int((part < 256).sum())))
    return found


NUMBERS = re.compile(r"loss (\S+) nats a token, perplexity (\S+), (\S+) bits per byte, (\S+) tokens, (\S+) bytes")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_evaluation_is_that_of_transformers(world, case, run, data, capfd, documents, masked):
    folder, theirs = run
    data = data.with_name("without-prompts.h5") if masked else data
    expected = by_hand(theirs, data, documents, masked) if world.rank == 0 else []
    rows = expected + [tuple(map(sum, zip(*expected)))] if documents else expected
    how = ["--documents"] * documents + ["data.documents=masked"] * masked
    for grid in every(2, grids(world.size), case):
        found = said(world, capfd, "eval", folder, "--data", data, "--batch", 2, *how, *grid)
        if world.rank == 0:
            lines = [tuple(map(float, match)) for match in NUMBERS.findall(found)]
            assert len(lines) == len(rows)
            for line, (total, count, size) in zip(lines, rows):
                mean, bits = total / max(1, count), total / math.log(2) / max(1, size)
                assert line[:3] == (pytest.approx(mean, abs=1e-6), pytest.approx(math.exp(mean), rel=1e-4),
                                    pytest.approx(bits, abs=1e-6))  # fmt: skip
                assert line[3:] == (count, size)


def test_a_run_that_has_not_ended_has_its_checkpoint(world, run, data, capfd):
    """Whose weights are here those of the export."""
    folder, _ = run
    of_export = said(world, capfd, "eval", folder, "--data", data)
    if world.rank == 0:
        (folder / "model").rename(folder / "moved")
    world.barrier()
    try:
        of_checkpoint = {said(world, capfd, "eval", folder, "--data", data, *grid) for grid in grids(world.size)[:2]}
        assert of_checkpoint == {of_export}
    finally:
        world.barrier()
        if world.rank == 0:
            (folder / "moved").rename(folder / "model")
        world.barrier()


def test_text_is_packed_on_the_way(world, run, data, capfd):
    folder, _ = run
    text = data.parent / "plain.txt"
    if world.rank == 0:
        text.write_text("7 times 7\n" * 9)
        pack([str(text)], data.parent / "plain.h5")
    world.barrier()
    found = {said(world, capfd, "eval", folder, "--data", path) for path in (text, data.parent / "plain.h5")}
    assert len(found) == 1


@pytest.mark.ranks(1, 2)
def test_refused_on_all_ranks(world, run, data, capfd):
    folder, _ = run
    cases = [
        (["eval", data.parent, "--data", data], "is neither a run folder"),
        (["eval", folder, "--data", f"{data}x.h5"], "x.h5 does not exist"),
        (["eval", folder, "--data", data, "--context", CONTEXT + 1], "--context must be at most model.context = 24"),
        (["eval", folder, "--data", data, "--context", 0], "both it and --batch at least 1, got 0 and 8"),
        (["sample", folder, "--top-p", 0], "--top-p above 0"),
        (["sample", folder, "--temperature", "nan"], "--temperature and --top-k finite and at least 0"),
        (["sample", folder, f"grid.data={world.size + 1}"], f"there are {world.size} ranks"),
        (["sample", folder, "model.layers=5"], "is another model than the section [model] says"),
    ]
    for command, message in cases:
        world.barrier()
        capfd.readouterr()
        assert main([str(word) for word in command]) == 2
        if world.rank == 0:
            assert message in capfd.readouterr().err


def test_draws(world):
    """By hand: of probabilities 0.1, 0.4, 0.3, 0.2."""
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()

    def chosen(draws, *how):
        return [chosen_by(logits, draw, *how) for draw in draws]

    assert chosen([0.0, 0.099, 0.101, 0.499, 0.501, 0.799, 0.801, 1.0], 1.0) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert chosen([0.0, 0.57, 0.58, 1.0], 1.0, 2) == [1, 1, 2, 2]  # 4/7 of the two likeliest
    assert chosen([0.0, 0.57, 0.58, 1.0], 1.0, 0, 0.5) == [1, 1, 2, 2]  # 0.4 does not reach it
    assert chosen([0.0, 1.0], 1.0, 0, 0.4) == [1, 1]
    assert chosen([0.0, 1.0], 0.0) == [1, 1]
    assert chosen([0.04, 0.06], 2.0) == [0, 0]  # flatter: 0.16 for the first
