"""Stops at awkward moments, one after the other in the same two processes: each leaves all that was done."""

import pytest
from running import begin_job, write_text
from tiny_jobs import command, losses, metrics

from hpctrain.checkpoint import folder

SCRIPT = """
import signal, time
from hpctrain.train import agreement
from hpctrain.checkpoint import shards
from hpctrain.train.trainer import Trainer

def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)

EVALUATED = ('run.eval_every=4', 'run.eval_batches=3', 'run.checkpoint_every=0')
train('run.name=whole', *EVALUATED)

# in the validation after steps 4, then 12: as if every step took seconds, all agree before each batch
agreement.AGREE_WITHIN = 0
evaluate, took = Trainer.evaluate, []
def interrupted(trainer, batches, stops, averaged):
    took.append(0)
    if rank and len(took) % 2:  # not where the job before left off
        interrupt()
    return evaluate(trainer, batches, stops, averaged)
Trainer.evaluate = interrupted
train('run.name=evaluation', *EVALUATED)
train('run.name=evaluation', *EVALUATED, '--resume')
train('run.name=evaluation', *EVALUATED, 'run.sample=0', '--resume')
train('run.name=evaluation', *EVALUATED, 'run.sample=1', '--resume')
Trainer.evaluate = evaluate

# before the first step, and in the export at the end
from hpctrain.train import finishing, training_data
packed, export = training_data.packed, finishing.export
training_data.packed = lambda *a: (interrupt(signal.SIGHUP), packed(*a))[1]
train('run.name=early')
training_data.packed = packed
finishing.export = lambda *a: (interrupt(signal.SIGTERM), export(*a))[1]
train('run.name=early', '--resume')
finishing.export = export

# an earlier save fails, that of the stop does not; then the disk is full at the stop
write = shards.write
step = Trainer.forward_backward
def failing(path, *a):
    if 'step-3.' in str(path):
        time.sleep(0.3)
        raise OSError('a passing fault')
    return write(path, *a)
shards.write = failing
at_step(4, lambda *_: interrupt(signal.SIGTERM))
train('run.name=passing', 'checkpoint.background=true', 'checkpoint.on_failure=stop')
Trainer.forward_backward = step
def full(path, *a):
    if 'step-5.' in str(path):
        raise OSError(28, 'No space left on device')
    return write(path, *a)
shards.write = full
at_step(5, lambda *_: interrupt(signal.SIGTERM))
train('run.name=full')
Trainer.forward_backward = step
shards.write = write

# a server that does not wait for the worker to agree
SERVER = ('data_parallel.method=parameter_server', 'data_parallel.staleness=1', 'run.checkpoint_every=0')
train('run.name=whole-server', *SERVER)
at_step(4, lambda *_: interrupt(signal.SIGTERM) if rank else None)
train('run.name=server', *SERVER)
Trainer.forward_backward = step
train('run.name=server', *SERVER, '--resume')

# by the clock of rank 0
agreement.time = type('Clock', (), {'monotonic': staticmethod(lambda: clock[0]), 'perf_counter': time.perf_counter})
clock = [0.0]
def tick(step):
    def ticking(*a):
        clock[0] += 25 if rank == 0 else 1000
        return step(*a)
    return ticking
patch(Trainer, 'forward_backward', tick)
train('run.name=clock', 'run.checkpoint_every=0', 'run.checkpoint_minutes=2', 'checkpoint.keep=9')
train('run.name=never', 'run.checkpoint_every=0', 'run.checkpoint_minutes=0')
Trainer.forward_backward = step

train('run.name=absent', '--resume')
train('run.name=absent', '--resume=auto')
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(runs, [status of each job in turn], {words of a job: its output})."""
    home = tmp_path_factory.mktemp("stops")
    job = begin_job(home, *command(home, write_text(home), SCRIPT, 2))
    output = job.wait(220).output
    parts = output.split("=== status ")
    ends = [part.split("\n", 1)[0].split(" ", 1) for part in parts[1:]]
    assert "absent --resume=auto" in ends[-1][1], output
    return home / "runs", {words: int(status) for status, words in ends}, dict(zip((words for _, words in ends), parts))


def the(told, *words):
    """(status, output) of the one job of these words."""
    _, status, output = told
    (found,) = (job for job in status if set(words) <= set(job.split()))
    return status[found], output[found]


def test_in_validation(told):
    """The step is saved, its validation left to the job that goes on; after the last step too."""
    runs, status, output = told
    jobs = [words for words in status if "run.name=evaluation" in words]
    assert [status[words] for words in jobs] == [85, 85, 85, 0]
    for words, step in zip(jobs, (4, 8, 12)):
        assert f"stopped by SIGINT after step {step};" in output[words]
    whole, stopped = metrics(runs / "whole"), metrics(runs / "evaluation")
    assert [r["step"] for r in stopped] == list(range(1, 13))
    for key in ("loss", "val_loss", "grad_norm"):
        assert [r.get(key) for r in stopped] == [r.get(key) for r in whole]
    assert (runs / "evaluation/model/config.json").exists()


def test_before_the_first_step_and_in_the_export(told):
    runs, status, _ = told
    code, output = the(told, "run.name=early", "--resume")
    assert (code, "resumed after step 1\n" in output) == (0, True)
    jobs = [words for words in status if "run.name=early" in words]
    assert [status[words] for words in jobs] == [85, 0]
    assert "stopped by SIGHUP after step 1; saved, go on with --resume" in told[2][jobs[0]]
    assert losses(runs / "early")[:12] == losses(runs / "whole")[:12]
    assert (runs / "early/model/config.json").exists()


def test_an_earlier_save_that_failed(told):
    runs, *_ = told
    code, output = the(told, "run.name=passing")
    assert code == 85, output
    assert "WARNING: no checkpoint of step 3: rank" in output
    assert "a passing fault" in output
    assert folder.steps(runs / "passing/checkpoints") == [4]


def test_a_server_that_goes_at_its_own_pace(told):
    """All stop two steps after the one in which one rank was told to; with one worker the run is exact."""
    runs, status, output = told
    jobs = [words for words in status if "run.name=server" in words]
    assert [status[words] for words in jobs] == [85, 0]
    assert "stopped by SIGTERM after step 6; saved" in output[jobs[0]]
    assert losses(runs / "server") == losses(runs / "whole-server")


def test_a_stop_that_cannot_be_saved(told):
    runs, *_ = told
    code, output = the(told, "run.name=full")
    assert code == 1
    said = (
        "hpctrain: error: told to stop by SIGTERM, but the checkpoint failed: step 5: rank 0: [Errno 28] No space left"
    )
    assert output.count(said) == 1
    assert f"the newest checkpoint is {runs}/full/checkpoints/step-3; go on with --resume" in output


def test_minutes(told):
    """25 s a step by rank 0's clock: after steps 5 and 10."""
    runs, *_ = told
    assert the(told, "run.name=clock")[0] == 0
    assert folder.steps(runs / "clock/checkpoints") == [10, 5]
    assert the(told, "run.name=never")[0] == 0
    assert folder.steps(runs / "never/checkpoints") == []


def test_nothing_to_resume(told):
    """An error once, in the words of `test_run_folder.py`; a requeued job begins anew."""
    code, output = the(told, "run.name=absent", "--resume")
    assert code == 2
    assert output.count("hpctrain: error: --resume: there are no checkpoints in") == 1
    code, output = the(told, "run.name=absent", "--resume=auto")
    assert code == 0
    assert "this job has no checkpoint yet: training begins anew" in output
