"""Caches that come with keys and values of all heads, as learned prefixes do, and go on with those of a rank."""

import pytest
from parallelize_checks import compare, numbers, tensor_grids
from test_parallelize_transformers import IDS, gpt2, llama

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.mpi


def t5():
    sizes = {"d_model": 12, "d_kv": 4, "num_heads": 3, "num_layers": 2, "d_ff": 14, "vocab_size": 19}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0))


# A model and its key heads.
MODELS = {
    "gpt2": (gpt2, 3),  # with dropout
    "gpt2 eager": (lambda: gpt2(attn_implementation="eager"), 3),
    "llama": (llama, 2),
    "llama with one key head": (lambda: llama(num_key_value_heads=1), 1),
    "llama of few heads": (lambda: llama(num_attention_heads=3, num_key_value_heads=3), 3),
    "t5": (t5, 3),
}


@pytest.mark.parametrize("case", MODELS)
def test_learned_prefixes(world, case):
    """Their gradients too, and those that come back through the cache to an earlier call."""
    make, heads = MODELS[case]

    def run(model, prefix):
        cache, more = transformers.DynamicCache([tuple(of_layer) for of_layer in prefix]), {}
        if case == "t5":
            cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
            more = {"encoder_outputs": model.encoder(IDS)}
        name = "decoder_input_ids" if more else "input_ids"
        return tuple(
            model(**{name: ids}, past_key_values=cache, use_cache=True, **more).logits for ids in IDS.split([5, 6], 1)
        )

    for grid in tensor_grids(world):
        compare(lambda: make().train(), grid, [numbers(2, 2, 2, heads, 3, 4, seed=8)], run)
