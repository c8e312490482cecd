"""The configuration: what is accepted, what is refused, and in which words."""

import re
from dataclasses import fields

import pytest

from hpctrain import models
from hpctrain.choices import STRATEGIES
from hpctrain.config import Config, PrecisionConfig, load_config, to_toml
from hpctrain.config.checks import check, token_slices
from hpctrain.config.option import options

GOOD = """
[run]
name = "mine"
[grid]
data = 2
tensor = [2, 1, 1]
[train]
lr = 1
"""


def written(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path):
    config = load_config(written(tmp_path, GOOD), ["grid.data=4", "run.name = other", "model.tied=false"])
    assert (config.run.name, config.grid.data, config.grid.tensor) == ("other", 4, [2, 1, 1])
    assert config.train.lr == 1.0
    assert isinstance(config.train.lr, float)
    assert config.model.tied is False
    assert config.ranks == 8


@pytest.mark.parametrize(
    ("override", "attribute", "value"),
    [
        ("grid.tensor=4", "tensor", 4),
        ("grid.tensor=[1,2,2]", "tensor", [1, 2, 2]),
        ("run.name=2024", "name", "2024"),
        ('run.name="a b"', "name", "a b"),
        ("data.text=a.txt", "text", ["a.txt"]),
        ('data.text=["a", "b"]', "text", ["a", "b"]),
        ("train.lr=3e-4", "lr", 3e-4),
        ("comm.all_reduce=parallel", "all_reduce", "direct"),
        ("comm.all_reduce=halving", "all_reduce", "rabenseifner"),
    ],
)
def test_values(override, attribute, value):
    config = load_config(overrides=[override])
    assert getattr(getattr(config, override.split(".")[0]), attribute) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stesp=3", "unknown key run.stesp; did you mean run.steps?"),
        ("runn.steps=3", "unknown section runn; did you mean run?"),
        ("nonsense", "an override must read section.key=value, got 'nonsense'"),
        ("run=3", "an override must read section.key=value, got 'run=3'"),
        ("run.steps=many", "run.steps must be int, got 'many'"),
        ("run.steps=1.5", "run.steps must be int, got 1.5"),
        ("run.steps=true", "run.steps must be int, got True"),
        ("run.steps=0", "run.steps must be at least 1, got 0"),
        ("train.lr=nan", "train.lr must be at least 0 and finite, got nan"),
        ("train.lr=inf", "train.lr must be at least 0 and finite, got inf"),
        ("train.batch=-1", "train.batch must be at least 1, got -1"),
        ("model.tied=yes", "model.tied must be bool, got 'yes'"),
        ("grid.tensor=[2, 1]", "grid.tensor must be one integer or three (x, y, z), got (2, 1)"),
        ("grid.tensor=2,1,1", "grid.tensor must be int or list[int], got '2,1,1'"),
        ("grid.data=0", "grid.data must be at least 1, got 0"),
        (
            "model.kind=bert",
            'model.kind must be "gpt2" or "llama" or "mixtral" or "package.module:function", got \'bert\'',
        ),
        ("precision.compute=fp8", 'precision.compute must be "fp32" or "fp64" or "bf16" or "fp16", got \'fp8\''),
        (
            "tensor.algorithm=strassen",
            'tensor.algorithm must be "agarwal" or "megatron" or "cannon" or "summa" or "two_half_d", got \'strassen\'',
        ),
        (
            'tensor.overlap=["input_gradient", "all"]',
            "tensor.overlap must list some of input_gradient, weight_gradient, got 'all'",
        ),
        (
            "data_parallel.method=horovod",
            "data_parallel.method must be " + " or ".join(f'"{name}"' for name in STRATEGIES) + ", got 'horovod'",
        ),
        ("data_parallel.servers=0", "data_parallel.servers must be at least 1, got 0"),
        (
            "train.optimizer=muon",
            'train.optimizer = "muon" needs the whole matrix of the momentum, which it orthogonalises, of which a rank '
            "may hold only a part; use one of adamw, adam, nadam, radam, adamax, adagrad, rmsprop, sgd",
        ),
        (
            "train.optimizer=adan",
            'train.optimizer must be "adamw" or "adam" or "nadam" or "radam" or "adamax" or "adagrad" or "rmsprop" '
            "or \"sgd\", got 'adan'",
        ),
        ("train.betas=[0.9]", "train.betas must be two numbers at least 0 and below 1, such as [0.9, 0.95], got [0.9]"),
        (
            "train.betas=[0.9, 1]",
            "train.betas must be two numbers at least 0 and below 1, such as [0.9, 0.95], got [0.9, 1.0]",
        ),
        (
            'data.mixture=[["a.h5"]]',
            'data.mixture must list paths of packed data with their weights above 0, such as [["code.h5", 0.7], '
            "[\"text.h5\", 0.3]], got ['a.h5']",
        ),
        (
            'data.mixture=[["a.h5", 0]]',
            'data.mixture must list paths of packed data with their weights above 0, such as [["code.h5", 0.7], '
            "[\"text.h5\", 0.3]], got ['a.h5', 0]",
        ),
        ('data.mixture=[["a.h5", 1], ["a.h5", 2]]', "data.mixture names a path twice; add the weights up"),
        ("train.min_lr=1", "train.min_lr must be at most train.lr = 0.001, got 1.0"),
        ("train.min_lr=-1", 'train.min_lr must be "auto" or at least 0 and finite, got -1.0'),
        ("train.min_lr=low", "train.min_lr must be \"auto\", got 'low'"),
        ("train.ema_use=export", "train.ema_use = ['export'] needs a train.ema_decay above 0, such as 0.999"),
        ("train.momentum=1.0", "train.momentum must be at least 0 and below 1, got 1.0"),
        (
            "comm.all_reduce=tree",
            'comm.all_reduce must be "shared" or "mpi" or "naive" or "ring" or "direct" or "rabenseifner" or '
            '"hierarchical" or "auto", got \'tree\'',
        ),
        ("precision.loss_scale=0", "precision.loss_scale must be above 0 and below 1e+30, got 0.0"),
        ("pipeline.slices=-1", "pipeline.slices must be at least 0, got -1"),
        ("pipeline.partition=best", 'pipeline.partition must be "even" or "dp" or "lp" or "rl", got \'best\''),
        ("precision.loss_scale=1e38", "precision.loss_scale must be above 0 and below 1e+30, got 1e+38"),
        ("run.device=tpu", 'run.device must be "auto" or "cpu" or "cuda", got \'tpu\''),
        ("model.heads=5", "model.width must be a multiple of model.heads = 5, got 128"),
        ("model.dropout=1.0", "model.dropout must be at least 0 and below 1, got 1.0"),
        ("data.validation=0.0", "data.validation must be above 0 and below 1, got 0.0"),
        ("run.name=a/b", "run.name must be a plain folder name, got 'a/b'"),
        (
            "run.name=data",
            'run.name must not be "data", as packed text is kept in the folder data of run.out; choose another',
        ),
        (
            "grid.pipeline=5",
            "grid.pipeline = 5 with pipeline.schedule = 1f1b has 5 stages, which need at least as many layers, got "
            "model.layers = 4; use fewer stages or more layers",
        ),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(ValueError) as refused:
        load_config(overrides=[override])
    assert str(refused.value) == message


@pytest.mark.parametrize("added", ["1e-08", "2.9e-08"])
@pytest.mark.parametrize("name", ["nadam", "radam", "adamax", "adagrad", "rmsprop"])
def test_an_optimizer_in_float16_divides_by_no_zero(name, added):
    """With what torch adds to a divisor; of the kin of Adam it may be given, where float16 has a number for it."""
    half = ["precision.compute=fp16", "precision.master=compute", f"train.optimizer={name}", f"train.eps={added}"]
    own = {"adagrad": "1e-10", "rmsprop": "1e-08"}.get(name, added)
    with pytest.raises(ValueError, match=f"train.optimizer = {name} in float16, where the {own} that it adds .* zero"):
        load_config(overrides=half)
    for enough in ("train.optimizer=adamw", "precision.master=fp32", "precision.compute=bf16"):
        load_config(overrides=[*half, enough])
    if name == "nadam":
        load_config(overrides=[*half, "train.eps=3e-8"])
    elif name in ("adagrad", "rmsprop"):
        with pytest.raises(ValueError, match="use precision.master=fp32, or adamw, adam or sgd"):
            load_config(overrides=[*half, "train.eps=1"])


@pytest.mark.parametrize(
    ("settings", "fits", "data"),
    [
        (["pipeline.schedule=pipedream"], 6, 1),
        (["pipeline.schedule=pipedream"], 3, 2),  # of the first replica; the second has two sequences
        (["pipeline.schedule=ampnet"], 6, 1),
        (["pipeline.schedule=ampnet", "pipeline.min_update_frequency=4"], 8, 1),  # updates of 4 and 2 sequences
    ],
)
def test_updates_on_the_way_have_a_sequence(settings, fits, data):
    """Of others the loss, which is the mean over the updates, would be nothing."""
    batch = [f"train.batch={6 if data == 1 else 5}", f"grid.data={data}", "train.clip=0", "model.tied=false"]
    load_config(overrides=[*settings, *batch, f"train.microbatches={fits}"])
    load_config(overrides=[*batch, f"train.microbatches={fits + 1}"])
    with pytest.raises(ValueError, match=f"train.microbatches = {fits + 1} would make updates of no sequence of train"):
        load_config(overrides=[*settings, *batch, f"train.microbatches={fits + 1}"])


SCALING = (
    "model.rope_scaling must be [factor, low_freq_factor, high_freq_factor, original context], such as [8, 1, 4, 8192],"
    " with factor and context at least 1 and 0 < low_freq_factor < high_freq_factor, got "
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kv_heads=3"], "model.kv_heads must be a divisor of model.heads = 4, got 3"),
        (
            ["model.width=130"],
            "model.width must be a multiple of model.heads = 4 where model.head_width is not given, got 130",
        ),
        (
            ["model.width=12"],
            "the rotary position embedding needs heads of an even width, got model.head_width (by default model.width /"
            " model.heads) = 3",
        ),
        (
            ["model.qkv_bias=true", "model.qk_norm=true"],
            "model.qkv_bias (as of Qwen2) and model.qk_norm (as of Qwen3) are of no one model that could be exported;"
            " leave one out",
        ),
        (["model.rope_scaling=8"], "model.rope_scaling must be list[float], got 8"),
        (["model.rope_scaling=[8, true, 4, 9]"], "model.rope_scaling must be list[float], got [8, True, 4, 9]"),
        (["model.rope_scaling=[8, 1]"], SCALING + "[8.0, 1.0]"),
        (["model.rope_scaling=[8, 4, 4, 9]"], SCALING + "[8.0, 4.0, 4.0, 9.0]"),
        (["model.rope_scaling=[8, 1, inf, 9]"], SCALING + "[8.0, 1.0, inf, 9.0]"),
        (["model.norm_eps=inf"], "model.norm_eps must be at least 0 and finite, got inf"),
    ],
)
def test_mistakes_of_a_llama_are_named(overrides, message):
    with pytest.raises(ValueError) as refused:
        load_config(overrides=["model.kind=llama", *overrides])
    assert str(refused.value) == message


def test_sizes_of_a_llama():
    """By default, and as given."""
    spec = models.get("llama")
    shape = spec.shape(vars(load_config(overrides=["model.kind=llama", "model.width=48"]).model))
    assert (shape.kv_heads, shape.head_width, shape.ffn, shape.rope_base) == (4, 12, 128, 10000.0)
    assert (shape.rope_scaling, shape.norm_eps, shape.qkv_bias, shape.qk_norm) == ((), 1e-5, False, False)
    given = ["kv_heads=2", "head_width=6", "ffn=50", "rope_base=5e5", "norm_eps=1e-6", "rope_scaling=[8, 1, 4, 64]"]
    shape = spec.shape(vars(load_config(overrides=["model.kind=llama", *("model." + each for each in given)]).model))
    assert (shape.kv_heads, shape.head_width, shape.ffn, shape.rope_base) == (2, 6, 50, 500000.0)
    assert (shape.rope_scaling, shape.norm_eps) == ((8.0, 1.0, 4.0, 64.0), 1e-6)
    # queries, keys and values, projection back, and three matrices of 50; 257 words; attention of 24 features
    costs = spec.costs(shape)
    assert costs.block_weights() == 128 * (24 + 24 + 24 + 150)
    assert costs.flops_per_token == 6 * (4 * 128 * 222 + 257 * 128) + 12 * 4 * 24 * 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run\n", "is not valid TOML"),
        ("steps = 3\n", "steps stands outside a section"),
        ("[run]\nsteps = '3'\n", "run.steps must be int, got '3'"),
        ("[run]\nseed = " + "9" * 5000, "config.toml is not valid TOML: Exceeds the limit"),
        ("[run]\nname = " + "[" * 100_000, "config.toml is not valid TOML"),
        ("# " + "x" * 2**20, "config.toml is longer than the 1048576 bytes"),
        ("[run]\nseed = 9223372036854775808", "config.toml: run.seed must fit into 64 bits, got an integer of 64"),
        ("[train]\nlr = 1" + "0" * 400, "config.toml: train.lr must fit into 64 bits, got an integer of 1329"),
        ('[run]\nout = "a\\u0000b"', "config.toml: run.out must be UTF-8 without zero bytes, got 'a\\x00b'"),
        (
            "[train]\nmicrobatches = 1_000_000_000",
            "train.microbatches must be at most 1048576, as a schedule lists all",
        ),
        ("[train]\nbatch = 0", "config.toml: train.batch must be at least 1"),
        (
            "[quantum]\na = 1\n",
            "unknown section quantum; known are run, model, data, grid, sequence, pipeline, tensor, ",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError) as refused:
        load_config(written(tmp_path, text))
    assert message in str(refused.value)


def test_a_missing_file():
    with pytest.raises(ValueError, match="the configuration cannot be read: .*nowhere.toml"):
        load_config("nowhere.toml")
    with pytest.raises(ValueError, match=r"'run.steps=3'; a file comes first, then what is section.key=value"):
        load_config("run.steps=3")


def test_what_is_written_is_read_back(tmp_path):
    text = 'data.text=["ä \\"b\\"", "c\\\\d", "\\u007f\\u0085\\u2028\\n"]'
    config = load_config(written(tmp_path, GOOD), [text, "train.lr=1e-05"])
    assert config.data.text[2] == "\x7f\x85\u2028\n"
    assert load_config(written(tmp_path, to_toml(config))) == config


def test_a_path_given_by_hand_is_not_packed_from_the_file_s_text(tmp_path):
    """A mistyped data.path is then an error, and no training on other text."""
    file = written(tmp_path, '[data]\npath = "a.h5"\ntext = ["mine.txt"]\n')
    cases = {
        (): ("a.h5", ["mine.txt"]),
        ("data.path=b.h5",): ("b.h5", []),
        ("data.path=b.h5", "data.text=yours.txt"): ("b.h5", ["yours.txt"]),
        ("data.text=yours.txt",): ("a.h5", ["yours.txt"]),
        ("data.path=",): ("", ["mine.txt"]),
    }
    for overrides, expected in cases.items():
        data = load_config(file, overrides).data
        assert (data.path, data.text) == expected, overrides


def test_a_mixture_given_by_hand_takes_the_place_of_the_file_s_data(tmp_path):
    """And the other way round; both by the same hand contradict each other."""
    file = written(tmp_path, '[data]\npath = "a.h5"\n')
    given = 'data.mixture=[["b.h5", 1], ["c.h5", 3.5]]'
    config = load_config(file, [given])
    assert (config.data.path, config.data.text, config.data.mixture) == ("", [], [["b.h5", 1], ["c.h5", 3.5]])
    file = written(tmp_path, to_toml(config))
    assert load_config(file) == config
    assert load_config(file, ["data.path=a.h5"]).data.mixture == []
    for both in ("data.path=a.h5", "data.text=a.txt"):
        with pytest.raises(ValueError, match="data.mixture takes the place of data.path and data.text"):
            load_config(file, [given, both])


def test_names_of_before_say_what_they_are_called_now():
    cases = {
        "replicas.method=zero1": "replicas.method is called data_parallel.method now",
        "pipeline.chunks=2": "pipeline.chunks is called pipeline.virtual_stages now",
        "precision.wire=bf16": "precision.wire is called precision.comm_dtype now",
    }
    for override, expected in cases.items():
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            load_config(overrides=[override])


def test_every_strategy_and_dtype_can_be_made():
    from hpctrain import data_parallel
    from hpctrain.train.dtypes import DTYPES

    assert {*data_parallel._MAKERS, "zero3"} == {*STRATEGIES}
    assert {*DTYPES} == {*options(PrecisionConfig, "precision")["compute"].choices}


def test_every_option_says_what_it_is_and_its_default_is_allowed():
    for section in fields(Config):
        for option in options(section.default_factory, section.name).values():
            assert option.help, option.name
            assert option.convert(option.default) == option.default
            option.validate(option.default)


def test_a_check_changes_nothing():
    config = Config()
    check(config)
    assert config == Config()
    assert config.data.text == []


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], []),
        (["pipeline.slices=[60, 68]"], [60, 68]),
        # 12 a token and 2 for each before it: the first half ends at 12 n + n² = (12·128 + 128²) / 2
        (["model.width=1", "model.heads=1", "pipeline.slices=2"], [89, 39]),
        (["model.width=4096", "pipeline.slices=2"], [64, 64]),
    ],
)
def test_token_slices_take_the_same_time(overrides, lengths):
    schedule = ["pipeline.schedule=terapipe"] if overrides else []
    assert token_slices(load_config(overrides=[*schedule, *overrides])) == lengths


def test_the_main_job_s_configuration():
    config = load_config("jobs/train.toml")
    assert config.ranks == 8


def test_sequence_ranks_of_any_number_are_divided_at_once():
    shape = load_config(overrides=["grid.sequence=9223372036854775804", "model.heads=4"]).grid_shape
    assert (shape["ring"], shape["ulysses"]) == (2305843009213693951, 4)
