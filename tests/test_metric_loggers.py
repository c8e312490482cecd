"""log.tensorboard and log.wandb: what metrics.jsonl has is there too; resumed, rolled back, and where it fails."""

import json
import sys
import time
import types

import pytest

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.train import metric_loggers
from hpctrain.train.run_folder import RunFolder

RECORDS = [
    {"step": n, "loss": 4.0 / n, "lr": 1e-3, "time": {"compute": 0.5, "data": 0.1 * n}, "job": "7", "idle": [1]}
    for n in range(1, 5)
]
RECORDS[2]["val_loss"] = 1.5
RECORDS[3]["loss"] = None


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def make(*overrides):
        return load_config(overrides=[f"run.out={tmp_path}", "run.name=a", *overrides])

    return make


def write(config, steps, resume="", after=0):
    if resume:
        (config.folder / "checkpoints/step-2").mkdir(parents=True, exist_ok=True)
    folder = RunFolder(config, resume)
    folder.begin(after)
    for step in steps:
        folder.log(dict(RECORDS[step - 1]))
    folder.close()


def expected():
    """{name: {step: value}}"""
    found = {}
    for record in RECORDS:
        for name, value in record.items():
            pairs = [(f"{name}/{key}", each) for key, each in value.items()] if name == "time" else [(name, value)]
            for key, each in pairs:
                if key not in ("step", "job", "idle") and each is not None:
                    found.setdefault(key, {})[record["step"]] = each
    return found


def test_tensorboard_has_the_metrics(config):
    """Of a run that stopped after three steps, and went on from a checkpoint of the second: each step once."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(config("log.tensorboard=true"), [1, 2, 3])
    write(config("log.tensorboard=true"), [3, 4], "must", after=2)
    events = reader.EventAccumulator(str(config().folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert found.keys() == expected().keys()
    for name, values in expected().items():
        assert found[name] == pytest.approx(values, rel=1e-6)  # it has them in float32
        assert len(events.Scalars(name)) == len(values)
    (text,) = events.Tensors("configuration/text_summary")
    assert b'name = "a"' in text.tensor_proto.string_val[0]


class StandIn(types.ModuleType):
    """wandb, as far as it is used."""

    def __init__(self):
        super().__init__("wandb")
        self.calls, self.lines = [], []

    Settings = dict

    def init(self, **given):
        self.calls.append(given)
        return types.SimpleNamespace(
            id=given["id"] or f"new-{len(self.calls)}", define_metric=lambda *_, **__: None, log=self.lines.append,
            finish=lambda: self.calls.append("finish"),
        )  # fmt: skip


def test_wandb_is_told_of_each_step_and_goes_on_with_its_run(config, monkeypatch):
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(metric_loggers.importlib.util, "find_spec", lambda name: wandb)
    write(config("log.wandb=mine"), [1, 2, 3])
    write(config("log.wandb=mine"), [3, 4], "must", after=2)
    write(config("log.wandb=mine"), [1])
    first, ended, second, _, third, _ = wandb.calls
    assert ended == "finish"
    assert (first["project"], first["name"], first["dir"]) == ("mine", "a", str(config().folder))
    assert first["config"]["model"]["layers"] == 4
    assert [call["id"] for call in (first, second, third)] == [None, "new-1", None]
    assert [line["step"] for line in wandb.lines] == [1, 2, 3, 3, 4, 1]
    times = {"time/compute": 0.5, "time/data": pytest.approx(0.3)}
    assert wandb.lines[2] == {"step": 3, "loss": 4 / 3, "lr": 1e-3, "val_loss": 1.5, **times}


def test_wandb_offline(config, monkeypatch):
    """The package itself, where it is installed, as in CI."""
    pytest.importorskip("wandb", reason="wandb is not installed here: HPCTRAIN_EXTRAS=wandb bash jobs/test.sbatch")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(config("log.wandb=mine"), [1, 2, 3])
    (run,) = (config().folder / "wandb").glob("offline-run-*")
    name = (config().folder / "wandb-run").read_text().strip()
    assert run.name.endswith(name)
    missing, until = {b"time/compute", b"val_loss"}, time.monotonic() + 30
    while missing and time.monotonic() < until:  # a process of its own writes them, and is not waited for
        time.sleep(0.1)
        content = (run / f"run-{name}.wandb").read_bytes()
        missing = {word for word in missing if word not in content}
    assert not missing


def test_what_fails_is_left_out_and_training_goes_on(config, monkeypatch, caplog):
    class Broken:
        def __init__(self, *_):
            pass

        def log(self, step, values):
            raise RuntimeError(f"no network at step {step}")

    monkeypatch.setattr(metric_loggers, "_wanted", lambda config: {Broken: ("json", True), StandIn: ("json", False)})
    write(config(), [1, 2])
    assert caplog.text.count("WARNING: no more metrics to Broken: RuntimeError: no network at step 1") == 1
    lines = (config().folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(("option", "package"), [("log.tensorboard=true", "tensorboard"), ("log.wandb=p", "wandb")])
def test_what_is_not_installed_is_told_before_anything_is_changed(config, monkeypatch, option, package):
    write(config(), [1])
    monkeypatch.setattr(metric_loggers.importlib.util, "find_spec", lambda name: None)
    name = option.split("=")[0]
    with pytest.raises(ValueError, match=f"{name} needs the package {package}.*HPCTRAIN_EXTRAS={package}"):
        RunFolder(config(option))
    assert not config().folder.with_name("a.1").exists()


def test_submit_says_so_on_the_login_node(tmp_path, monkeypatch, capsys):
    """As of everything else that the job would refuse."""
    from running import ROOT

    monkeypatch.setattr(metric_loggers.importlib.util, "find_spec", lambda name: None)
    command = ["submit", str(ROOT / "jobs/train.sbatch"), "--dry-run", f"run.out={tmp_path}", "log.tensorboard=true"]
    assert main(command) == 2
    assert "log.tensorboard needs the package tensorboard" in capsys.readouterr().err
