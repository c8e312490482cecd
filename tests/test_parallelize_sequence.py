"""Models of Hugging Face's whose sequences several ranks share: losses, logits, gradients and training of one rank."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE, check_gradients, numbers, on_first

import hpctrain as ht
from hpctrain.shard import split

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4, 8)]

GRIDS = {
    2: [{"data": (1, 2, 1)}, {"data": (1, 1, 2)}],
    4: [{"data": (1, 2, 2)}, {"data": (2, 1, 2)}, {"data": (1, 2, 1), "tensor": 2}],
    8: [{"data": (2, 2, 1), "tensor": 2}, {"data": (1, 2, 2), "tensor": (2, 1, 1)}],
}


@functools.cache
def grids(ranks):
    return [ht.Grid(**sizes) for sizes in GRIDS[ranks]]


def gpt2(**changes):
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 128, "vocab_size": 19}
    rest = {"bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **rest, **changes}))


def llama(**changes):
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 18, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 19, "max_position_embeddings": 128,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


MODELS = {
    "gpt2": gpt2,
    "gpt2 scaled by layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
    "llama": llama,
    "gpt2 of one head": lambda: gpt2(n_head=1),  # none on some tensor ranks
    "llama of one head": lambda: llama(num_attention_heads=1, num_key_value_heads=1),
    "llama with one key head": lambda: llama(num_key_value_heads=1, attention_bias=True),
}


def seeded(make):
    torch.manual_seed(3)
    return make().double().train()


def ids(length, sequences=3, seed=0):
    return torch.randint(19, (sequences, length), generator=torch.Generator().manual_seed(seed))


def loss_of(logits, labels):
    """As Hugging Face's, which takes it in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("length", [103, 17])
@pytest.mark.parametrize("case", MODELS)
def test_loss_logits_and_gradients(world, case, length):
    """With labels, some of which do not count, and of logits, which are whole."""
    serial = seeded(MODELS[case])
    whole = ids(length)
    labels = whole.masked_fill(whole == 3, -100)
    # Of two forwards, as below: where norms are in float32, gradients of both together differ from their sum.
    expected = [serial(whole).logits, loss_of(serial(whole).logits, labels)]
    weights = numbers(*expected[0].shape)
    (expected[1] + (expected[0] * weights).sum()).backward()
    turn = list(MODELS).index(case) // 2 % 2
    for grid in grids(world.size) if world.size == 2 else grids(world.size)[turn::2]:
        model = ht.parallelize(seeded(MODELS[case]), grid)
        logits, found = model(whole).logits, model(whole, labels=labels, attention_mask=torch.ones_like(whole))
        torch.testing.assert_close([logits, found.loss], expected, **CLOSE)
        assert found.logits is None
        assert found.loss.item() == pytest.approx(serial(whole, labels=labels).loss.item(), rel=1e-6)
        (found.loss / grid.replica.size + (logits * weights).sum() / grid.replica.size).backward()
        ht.sync_gradients(model)
        check_gradients(model, serial, grid)


def test_seven_tokens(world):
    """Fewer than the chunks of a zigzag, on some of these grids; fewer than the ranks are refused."""
    for grid in grids(world.size):
        serial = seeded(llama)
        model = ht.parallelize(copy.deepcopy(serial), grid)
        torch.testing.assert_close(model(ids(7)).logits, serial(ids(7)).logits, **CLOSE)
        with pytest.raises(ValueError, match="the model itself: sequences of 1 tokens leave some of the "):
            model(ids(1))


@pytest.mark.parametrize("case", ["gpt2", "llama with one key head"])
@pytest.mark.parametrize("way", ["loop", "trainer"])
def test_three_steps(world, case, way):
    """Of two batches each, with clipping, on replicas that have different ones."""
    for grid in grids(world.size):
        serial = seeded(MODELS[case])
        model = ht.parallelize(copy.deepcopy(serial), grid)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, serial))

        def share(model, part, replicas=grid.replica.size):
            return model(part, labels=part).loss / replicas / 2

        trainer = ht.Trainer(model, grid, ours, loss=share, max_norm=0.1) if way == "trainer" else None
        mine = split(2 * grid.replica.size, grid.replica.size, grid.replica.rank)
        for step in range(3):
            batches = [ids(29, 2 * grid.replica.size, seed=2 * step + n) for n in range(2)]
            expected = on_first(grid, functools.partial(serial_step, serial, theirs, batches))
            if trainer:
                loss, norm = trainer.step([batch[mine] for batch in batches])
            else:
                ours.zero_grad()
                shares = [share(model, batch[mine]) for batch in batches]
                sum(shares).backward()
                ht.sync_gradients(model)
                norm = float(ht.clip_grad_norm_(model, 0.1))
                ours.step()
                loss = grid.replica.comm.allreduce(sum(shares).item())
            assert loss == pytest.approx(expected[0], rel=1e-12)
            assert norm == pytest.approx(expected[1], rel=1e-11)
        gathered = ht.gather_state_dict(model)
        if grid.rank == 0:
            torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_are_clipped_in_between(world, zero):
    """With zero=1 a second backward adds to the mean; with zero=0 that would count once for each rank of a sequence."""
    whole = ids(29)
    for grid in grids(world.size):
        serial = seeded(gpt2)
        model = ht.parallelize(copy.deepcopy(serial), grid, zero=zero)
        norms = []
        for m in (serial, model):
            for limit in (0.1, 1e9):
                loss_of(m(whole).logits, whole).backward()
                if zero == 0 and m is model and limit > 1:
                    with pytest.raises(ValueError, match="added to the gradients of .* or use zero=1"):
                        torch.nn.utils.clip_grad_norm_(m.parameters(), limit)
                else:
                    norms.append(float(torch.nn.utils.clip_grad_norm_(m.parameters(), limit)))
        assert norms[2:] == pytest.approx(norms[: len(norms) - 2], rel=1e-11)


def serial_step(model, optimizer, batches):
    """The loss and the norm of gradients."""
    optimizer.zero_grad()
    loss = sum(loss_of(model(batch).logits, batch) / 2 for batch in batches)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item(), norm.item()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_packed_documents_and_embeddings(world, make):
    """Positions that begin anew are documents that do not see each other, but where Hugging Face would make a cache;
    embeddings from outside have gradients."""
    positions = torch.tensor([[*range(11), *range(18)], [*range(29)]])
    serial = seeded(make)
    embedded = numbers(2, 29, 12).requires_grad_()
    weights = numbers(2, 29, 19, seed=2)

    def run(model, **cache):
        logits = model(inputs_embeds=embedded, position_ids=positions, **cache).logits
        return logits, torch.autograd.grad((logits * weights).sum(), embedded)[0]

    caches = [{"use_cache": False}, {}]
    expected = [run(serial, **cache) for cache in caches]
    assert not torch.allclose(expected[0][0], expected[1][0])
    for grid in grids(world.size):
        model = ht.parallelize(copy.deepcopy(serial), grid)
        torch.testing.assert_close([run(model, **cache) for cache in caches], expected, **CLOSE)


@pytest.mark.ranks(2, 4)
def test_recomputed_blocks_and_models_without_a_head(world):
    serial = seeded(llama)
    whole = ids(29)
    for grid in grids(world.size):
        model = ht.parallelize(copy.deepcopy(serial), grid)
        model.gradient_checkpointing_enable()
        plain = copy.deepcopy(serial)
        loss_of(plain(whole).logits, whole).backward()
        (model(whole, labels=whole).loss / grid.replica.size).backward()
        ht.sync_gradients(model)
        check_gradients(model, plain, grid)
        base = ht.parallelize(copy.deepcopy(serial).model, grid)
        torch.testing.assert_close(base(whole).last_hidden_state, serial.model(whole).last_hidden_state, **CLOSE)
        base.set_attn_implementation("eager")
        torch.testing.assert_close(base(whole).last_hidden_state, serial.model(whole).last_hidden_state, **CLOSE)


DROPOUT = {
    "gpt2": lambda: gpt2(embd_pdrop=0.2, resid_pdrop=0.3, attn_pdrop=0.4),
    "gpt2 of one head": lambda: gpt2(n_head=1, resid_pdrop=0.3, attn_pdrop=0.4),
    "llama with one key head": lambda: llama(num_key_value_heads=1, attention_dropout=0.3),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", DROPOUT)
def test_dropout(world, case, recompute):
    """The masks that one rank draws, of the embeddings, of what goes back to the residual stream, and in attention;
    sequences of two lengths, of which the first is computed once more after the second has passed."""
    serial = seeded(DROPOUT[case])
    first, second = ids(29), ids(17, seed=1)
    whole, sharing = copy.deepcopy(serial), [grid for grid in grids(world.size) if grid.replica.size == 1]
    for grid in sharing:
        model = ht.parallelize(copy.deepcopy(serial), grid)
        whole.zero_grad()
        losses = []
        for each in (whole, model):
            if recompute:
                each.gradient_checkpointing_enable()
            torch.manual_seed(5)
            logits = [each(batch).logits for batch in (first, second)]
            losses.append(sum(map(loss_of, logits, (first, second))))
            losses[-1].backward()
        ht.sync_gradients(model)
        torch.testing.assert_close(losses[1], losses[0], **CLOSE)
        check_gradients(model, whole, grid)
        model.eval(), whole.eval()
        torch.testing.assert_close(model(first).logits, whole(first).logits, **CLOSE)
        model.train(), whole.train()
