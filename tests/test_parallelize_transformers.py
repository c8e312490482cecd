"""Hugging Face's GPT-2 and Llama, parallelized: loss, gradients, training, generation, export equal the originals'."""

import copy

import pytest
import torch
from parallelize_checks import CLOSE, check_gradients, compare, held_once, numbers, part_of, tensor_grids

import hpctrain as ht
from hpctrain.shard import split_sizes

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.mpi

IDS = (torch.arange(22) * 7 % 19).view(2, 11)
PADDING = torch.tensor([[1] * 11, [1] * 8 + [0] * 3])


def gpt2(**changes):
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 19}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **special, **changes}))


def llama(**changes):
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 18, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 19, "max_position_embeddings": 16,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


MODELS = {
    "gpt2": gpt2,  # dropout of 0.1 everywhere, as by default
    "gpt2 eager": lambda: gpt2(attn_implementation="eager", attn_pdrop=0.0),
    "gpt2 eager with dropout": lambda: gpt2(attn_implementation="eager"),
    "gpt2 with cross attention": lambda: gpt2(add_cross_attention=True),
    "gpt2 with its own head": lambda: gpt2(tie_word_embeddings=False, n_inner=7, scale_attn_by_inverse_layer_idx=True),
    "llama": llama,
    "llama with dropout": lambda: llama(attention_dropout=0.3),
    "llama eager with dropout": lambda: llama(attention_dropout=0.3, attn_implementation="eager"),
    "llama with one key head": lambda: llama(num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "llama with a key head each": lambda: llama(num_key_value_heads=6, tie_word_embeddings=True),
    "llama of few heads": lambda: llama(num_attention_heads=3, num_key_value_heads=3, intermediate_size=3),
}
OF_FOUR = ("gpt2", "gpt2 eager with dropout", "llama", "llama with one key head", "llama of few heads")


@pytest.mark.parametrize(
    "case", [case if case in OF_FOUR else pytest.param(case, marks=pytest.mark.ranks(1, 2)) for case in MODELS]
)
def test_loss_and_gradients(world, case):
    def run(model, ids, *encoded):
        more = {"encoder_hidden_states": encoded[0]} if encoded else {}
        out = model(ids, labels=ids, attention_mask=PADDING, output_hidden_states=True, **more)
        return out.loss, out.logits, *out.hidden_states

    inputs = [IDS, numbers(2, 5, 12)] if "cross" in case else [IDS]
    for grid in tensor_grids(world):
        held_once(compare(lambda: MODELS[case]().train(), grid, inputs, run), grid)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_learned_masks(world, make, heads):
    """A position bias, of all heads or by head: its gradient is of all heads."""
    how = {"n_head": heads} if make is gpt2 else {"num_attention_heads": heads, "num_key_value_heads": 1}

    def run(model, mask):
        return model(IDS, attention_mask=mask).logits

    for grid in tensor_grids(world):
        for masks in {1, heads}:
            compare(lambda: make(**how).train(), grid, [numbers(2, masks, 11, 11, seed=8)], run)


def test_padding_on_the_left(world):
    """Its queries attend to nothing, and get zeros, with dropout too."""
    for grid in tensor_grids(world):
        compare(
            lambda: gpt2().train(), grid, [IDS], lambda model, ids: model(ids, attention_mask=PADDING.flip(1)).logits
        )


def test_attention_is_divided(world):
    for grid in tensor_grids(world):
        model = ht.parallelize(
            seeded(lambda: llama(hidden_size=16, num_attention_heads=8, num_key_value_heads=8)), grid
        )
        attention = model.model.layers[0].self_attn
        features = 4 * split_sizes(8, world.size)[grid.tensor.rank]
        assert part_of(attention.q_proj.weight).shape == (features, 16)
        assert part_of(attention.o_proj.weight).shape == (16, features)


def adapted(make, *paths, **parts):
    """With a layer beside another, as LoRA has, in some places, and other parts in some."""

    def build():
        model = make().train()
        for path in paths:
            model.set_submodule(path, Adapted(model.get_submodule(path)))
        for path, part in parts.items():
            model.set_submodule(path.replace("__", "."), part)
        return model

    return build


class Adapted(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        weight = base.weight if isinstance(base, torch.nn.Linear) else base.weight.t()
        self.base, self.beside = base, torch.nn.Linear(*weight.t().shape)

    def forward(self, x):
        return self.base(x) + self.beside(x)


EXCHANGED = {
    "gpt2": adapted(gpt2, "transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"),
    "gpt2's activation": adapted(gpt2, transformer__h__0__mlp__act=torch.nn.Softmax(-1)),
    "llama": adapted(llama, "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"),
    "llama's activation": adapted(llama, model__layers__0__mlp__act_fn=torch.nn.Softmax(-1)),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", EXCHANGED)
def test_parts_exchanged(world, case):
    """Nothing is taken over that does more than what Hugging Face put there."""
    for grid in tensor_grids(world):
        compare(EXCHANGED[case], grid, [IDS], lambda model, ids: model(ids).logits)


@pytest.mark.ranks(1, 2)
def test_a_layer_with_a_forward_of_its_own_is_not_taken_for_its_base(world):
    class Tripled(torch.nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    def make():
        model = llama()
        model.model.layers[0].self_attn.q_proj = Tripled(12, 24, bias=False)
        model.model.layers[1].mlp.up_proj = Tripled(12, 18, bias=False)
        return model

    for grid in tensor_grids(world):
        held_once(compare(make, grid, [IDS], lambda model, ids: model(ids).logits), grid)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_three_steps_of_adamw(world, case):
    grid = tensor_grids(world)[-1]
    serial = seeded(MODELS[case]).double().train()
    model = ht.parallelize(copy.deepcopy(serial), grid)
    losses = []
    for trained in (serial, model):
        decay, plain = ([p for p in trained.parameters() if (p.dim() > 1) == d] for d in (True, False))
        optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=0.01)
        torch.manual_seed(9)
        for _ in range(3):
            loss = trained(IDS, labels=IDS).loss
            optimizer.zero_grad()
            loss.backward()
            if trained is serial:
                norm = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
            else:
                norm = ht.clip_grad_norm_(model, 0.5)
            optimizer.step()
            losses.append([loss.detach(), norm.detach()])
    torch.testing.assert_close(losses[3:], losses[:3], **CLOSE)
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        # AdamW divides by the root of the second moment: a rounding difference of a tiny gradient comes out large
        torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-9, atol=1e-9)
        serial.load_state_dict(gathered)


def test_gradient_checkpointing(world):
    grid = tensor_grids(world)[-1]
    serial = seeded(gpt2).double().train()
    model = ht.parallelize(copy.deepcopy(serial), grid)
    model.activation_checkpointing_enable()
    for trained in (serial, model):
        torch.manual_seed(9)
        trained(IDS, labels=IDS).loss.backward()
    check_gradients(model, serial, grid)


@pytest.mark.parametrize("case", ["gpt2", "llama", "llama with one key head"])
def test_generation_with_a_cache(world, case):
    grid = tensor_grids(world)[-1]
    serial = seeded(MODELS[case]).double().eval()
    model = ht.parallelize(copy.deepcopy(serial), grid)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected, got = (m.generate(IDS[:, :5], use_cache=True, **how) for m in (serial, model))
    assert torch.equal(got, expected)


@pytest.mark.ranks(1, 2)
def test_continuous_batching(world):
    """Of all heads on one rank; else refused, as errors within it are logged alone."""
    model = ht.parallelize(seeded(llama).eval(), tensor_grids(world)[-1])
    sizes = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16, page_size=16)
    how = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if world.size == 1:
        expected = model.generate(IDS[:1, :5], max_new_tokens=2, do_sample=False, pad_token_id=0)
        (got,) = model.generate_batch([IDS[0, :5].tolist()], how, sizes).values()
        assert got.generated_tokens == expected[0, 5:].tolist()
        return
    text = r"line \d+ of .*transformers.py: continuous batching of a LlamaForCausalLM keeps .* call generate"
    with pytest.raises(ValueError, match=text):
        model.generate_batch([IDS[0, :5].tolist()], how, sizes)


@pytest.mark.ranks(1, 2)
def test_saved_for_hugging_face(world, tmp_path):
    grid = tensor_grids(world)[-1]
    serial = seeded(gpt2)
    model = ht.parallelize(copy.deepcopy(serial), grid)
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        model.save_pretrained(tmp_path, state_dict=gathered)
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        for name, tensor in serial.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_saved_whole(world, tmp_path):
    """save_pretrained of the model, and of a part of it: the first rank writes what one rank would."""
    tmp_path = world.bcast(tmp_path)
    grid = tensor_grids(world)[-1]
    for make in (gpt2, lambda: llama(tie_word_embeddings=False)):
        serial = seeded(make)
        model = ht.parallelize(copy.deepcopy(serial), grid)
        for part, plain in ((model, serial), (model.base_model, serial.base_model)):
            assert type(part).__name__ == type(plain).__name__
            part.save_pretrained(tmp_path)
            if grid.rank == 0:
                again = type(plain).from_pretrained(tmp_path)
                assert again.config.architectures == [type(plain).__name__]
                for name, tensor in plain.state_dict().items():
                    assert torch.equal(again.state_dict()[name], tensor), name
            world.Barrier()


@pytest.mark.ranks(1, 2)
def test_embeddings_resized_afterwards(world):
    model = ht.parallelize(seeded(gpt2), tensor_grids(world)[-1])
    with pytest.raises(ValueError, match=r"line \d+ of .*resize_token_embeddings of a GPT2LMHeadModel whose .* before"):
        model.resize_token_embeddings(32)
    assert model.resize_token_embeddings() is model.transformer.wte


@pytest.mark.parametrize("make", [lambda: gpt2(attn_pdrop=0.3), lambda: llama(attention_dropout=0.3)])
def test_eager_attention_afterwards(world, make):
    """With dropout: the masks of one rank."""
    serial = seeded(make).double().train()
    for grid in tensor_grids(world):
        model = ht.parallelize(copy.deepcopy(serial), grid)
        losses = []
        for trained in (copy.deepcopy(serial), model):
            trained.set_attn_implementation("eager")
            torch.manual_seed(9)
            losses.append(trained(IDS, labels=IDS, attention_mask=PADDING).loss)
        torch.testing.assert_close(losses[1], losses[0], **CLOSE)


def test_whisper(world):
    config = transformers.WhisperConfig(
        vocab_size=31, d_model=12, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3, num_mel_bins=6,
        decoder_attention_heads=3, encoder_ffn_dim=14, decoder_ffn_dim=14, max_source_positions=8, pad_token_id=0,
        max_target_positions=12, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[],
        begin_suppress_tokens=[], use_cache=False,
    )  # fmt: skip
    serial = seeded(lambda: transformers.WhisperForConditionalGeneration(config)).double().train()
    grid = tensor_grids(world)[-1]
    model = ht.parallelize(copy.deepcopy(serial), grid)
    losses = []
    for trained in (serial, model):
        optimizer = torch.optim.SGD(trained.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = trained(numbers(2, 6, 16), labels=IDS).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-11)
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-11, atol=1e-11)


def test_attention_weights(world):
    """Whole, for whoever asks: on ranks without heads too."""
    for make in (lambda: gpt2(attn_implementation="eager", attn_pdrop=0.0), MODELS["llama of few heads"]):
        serial = seeded(make).eval()
        serial.set_attn_implementation("eager")
        model = ht.parallelize(copy.deepcopy(serial), tensor_grids(world)[-1])
        expected, got = (m(IDS, output_attentions=True).attentions for m in (serial, model))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(1, 2)
def test_initial_weights_of_its_own(world):
    """Gemma's norms begin with zeros, unlike all others."""
    with torch.device("meta"):
        model = transformers.GemmaModel(transformers.GemmaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=9))
    with pytest.raises(ValueError, match="the model is on the meta device, and how a GemmaModel is initialised is not"):
        ht.parallelize(model, tensor_grids(world)[-1])


def seeded(make):
    torch.manual_seed(3)
    return make()
