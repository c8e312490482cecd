"""The configuration: what is accepted, what is refused, and in which words."""

import pytest

from hpctrain.config import load_config, to_toml
from hpctrain.config_checks import METHODS

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
        ("run.steps=0", "run.steps must be at least 1 and finite, got 0"),
        ("train.lr=nan", "train.lr must be at least 0 and finite, got nan"),
        ("train.lr=inf", "train.lr must be at least 0 and finite, got inf"),
        ("train.batch=-1", "train.batch must be at least 1 and finite, got -1"),
        ("model.tied=yes", "model.tied must be bool, got 'yes'"),
        ("grid.tensor=[2, 1]", "grid.tensor must be one integer or three (x, y, z), got (2, 1)"),
        ("grid.tensor=2,1,1", "grid.tensor must be int or list[int], got '2,1,1'"),
        ("grid.data=0", "grid.data must be an integer of at least 1, got 0"),
        ("model.kind=bert", "model.kind must be \"gpt2\", got 'bert'"),
        ("precision.compute=fp8", 'precision.compute must be "fp32" or "fp64" or "bf16" or "fp16", got \'fp8\''),
        (
            "tensor.algorithm=strassen",
            "tensor.algorithm must be one of agarwal, megatron, cannon, summa, two_half_d, got 'strassen'",
        ),
        (
            'tensor.overlap=["prefetch", "all"]',
            "tensor.overlap must list some of input_gradient, weight_gradient, prefetch, got 'all'",
        ),
        (
            "replicas.method=horovod",
            "replicas.method must be " + " or ".join(f'"{name}"' for name in METHODS) + ", got 'horovod'",
        ),
        ("replicas.servers=0", "replicas.servers must be at least 1 and finite, got 0"),
        (
            "train.optimizer=muon",
            'train.optimizer = "muon" needs the whole matrix of the momentum, which it orthogonalises, of which a rank '
            "may hold only a part; use one of adamw, adam, nadam, radam, adamax, adagrad, rmsprop, sgd",
        ),
        (
            "train.optimizer=adan",
            "train.optimizer must be one of adamw, adam, nadam, radam, adamax, adagrad, rmsprop, sgd, got 'adan'",
        ),
        ("train.momentum=1.0", "train.momentum must be at least 0 and below 1, got 1.0"),
        (
            "comm.all_reduce=tree",
            'comm.all_reduce must be "shared" or "mpi" or "naive" or "ring" or "parallel" or "halving" or '
            '"hierarchical" or "auto", got \'tree\'',
        ),
        ("precision.loss_scale=0", "precision.loss_scale must be above 0 and finite, got 0.0"),
        ("precision.loss_scale=inf", "precision.loss_scale must be above 0 and finite, got inf"),
        ("run.device=tpu", 'run.device must be "auto" or "cpu" or "cuda", got \'tpu\''),
        ("model.heads=5", "model.width must be a multiple of model.heads = 5, got 128"),
        ("model.dropout=1.0", "model.dropout must be at least 0 and below 1, got 1.0"),
        ("data.validation=0.0", "data.validation must lie between 0 and 1, got 0.0"),
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
        ("[quantum]\na = 1\n", "unknown section quantum; known are run, model, data, grid, pipeline, tensor, comm, "),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError) as refused:
        load_config(written(tmp_path, text))
    assert message in str(refused.value)


def test_a_missing_file():
    with pytest.raises(ValueError, match="the configuration cannot be read: .*nowhere.toml"):
        load_config("nowhere.toml")


def test_what_is_written_is_read_back(tmp_path):
    text = 'data.text=["ä \\"b\\"", "c\\\\d", "\\u007f\\u0085\\u2028\\n"]'
    config = load_config(written(tmp_path, GOOD), [text, "train.lr=1e-05"])
    assert config.data.text[2] == "\x7f\x85\u2028\n"
    assert load_config(written(tmp_path, to_toml(config))) == config


def test_a_path_given_by_hand_is_not_packed_from_the_file_s_text(tmp_path):
    """A mistyped data.path is then an error, and no training on other text."""
    file = written(tmp_path, '[data]\npath = "a.h5"\ntext = ["mine.txt"]\n')
    told = {
        (): ("a.h5", ["mine.txt"]),
        ("data.path=b.h5",): ("b.h5", []),
        ("data.path=b.h5", "data.text=yours.txt"): ("b.h5", ["yours.txt"]),
        ("data.text=yours.txt",): ("a.h5", ["yours.txt"]),
        ("data.path=",): ("", ["mine.txt"]),
    }
    for overrides, expected in told.items():
        data = load_config(file, overrides).data
        assert (data.path, data.text) == expected, overrides


def test_every_method_can_be_made():
    from hpctrain import replicas

    assert {*replicas._MAKERS, "zero3"} == {*METHODS}


def test_the_main_job_s_configuration():
    config = load_config("jobs/train.toml")
    assert config.ranks == 8
