"""All schedules by name.

What the papers say of them, in time of one rank's whole share of the model (F, I, W; B = I + W; p ranks,
m microbatches, v stages a rank) and in activations of one microbatch of that share;
`tests/test_schedule_formulas.py` asserts it.

| schedule | bubble | peak memory | where it holds |
|---|---|---|---|
| gpipe | (p-1)(F+B) | m | always |
| 1f1b | (p-1)(F+B) | min(m, p-r) on rank r | always |
| interleaved | (p-1)(F+B)/v | p + (p-1)/v, v > 1 | m a multiple of p (memory: 2p or more) |
| zb-h1 | (p-1)(F+I-W) | p | W at most F and I, m at least 2p |
| zb-v | (p-1)F/v before the first and after the last action, none between | p | F = I = W, m at least 2p-1 |
| chimera | p-2 of 2m+p-2 slots | p/2+1+min(r, p-1-r) | F = B; m a multiple of p |
| chimera | 2(p-2)F of 3mF+2(p-2)F | as above | B = 2F, **m = p only** |
| dualpipe | (p/2-1)(F&B+B-3W) on the middle ranks | p+1 | **F = I**; m at least 2p; weights twice |
| dualpipev | (p-1)(F&B+B-3W)/2 on the last rank | (2p+1)/2 | **F = I**; m at least 2p |
| terapipe | (p-1)(F+B) max t of the slices | m | always; the time is (F+B)(m Σt + (p-1) max t) |
| pipedream | fill and drain of 1f1b once | p-s versions of weights, delay p-1-s | m at least p |
| pipedream-2bw | the same | 2 versions of weights, delay 1 | m at least 2p |
| ampnet | fill and drain of 1f1b once | as pipedream | p active keys, equal stages; a run goes by what arrives |

Where a formula is wrong:

DualPipe's is of equal forwards and input gradients: with F = 2, I = W = 1 and nothing hidden, p = 4 gives a bubble of 4
where it says 3. Where a pair hides something (F&B < F+B), the outer ranks form fewer pairs than the middle ones and so
work longer; all ranks end together.

Chimera's bubble for B = 2F, (p-2)/(3m/2+p-2) of the time, is too small for m > p. With more microbatches than ranks
its units do not close up (a unit's last backwards take two slots, the next unit's forwards one), and the bubble is
(p-2)(1+m/p)F: 6 F for p = 4, m = 8, where the formula says 4 F.
"""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.pipeline.bidirectional import chimera, dualpipe, dualpipev
from hpctrain.pipeline.delayed import ampnet, pipedream, pipedream_2bw
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.synchronous import gpipe, interleaved, one_f_one_b
from hpctrain.pipeline.terapipe import terapipe
from hpctrain.pipeline.zero_bubble import zb_h1, zb_v

_MAKERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "terapipe": terapipe,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "ampnet": ampnet,
}
NAMES = tuple(_MAKERS)
_TWO_STAGES = ("zb-v", "dualpipev")


def schedule(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None = None, slices: int | None = None,
    **asynchronous: int | bool | None,
) -> Schedule:  # fmt: skip
    """The schedule of that name for a chain of stages.

    Args:
        name: one of `NAMES`.
        ranks, microbatches: any number, in all `synchronous.LARGEST`; where a schedule cannot use one, the error says
            what would do.
        virtual_stages: stages a rank, for interleaved (2 if not given); zb-v and dualpipev have 2, the others one.
        slices: of a microbatch's tokens, for terapipe (as many as ranks if not given).
        asynchronous: `max_active_keys`, `min_update_frequency` and `staleness_correction`, for ampnet alone; see
            `pipeline.AMPNet`.

    Raises:
        ValueError: naming the option, what it got and what would do.

    >>> schedule("zb-h1", ranks=4, microbatches=8).simulate().idle
    [3.0, 3.0, 3.0, 3.0]
    """
    if name not in _MAKERS:
        raise ValueError(f"there is no schedule {name!r}; use one of {', '.join(NAMES)}")
    options: dict[str, int | bool | None] = {}
    if name == "interleaved":
        options["virtual_stages"] = 2 if virtual_stages is None else virtual_stages
    elif virtual_stages not in (None, 2 if name in _TWO_STAGES else 1):
        has = 2 if name in _TWO_STAGES else 1
        raise ValueError(
            f"virtual_stages={virtual_stages}: {name} has {has} to a rank; leave virtual_stages out, or use interleaved"
        )
    if name == "terapipe":
        options["slices"] = ranks if slices is None else slices
    elif slices not in (None, 1):
        raise ValueError(f"slices={slices}: {name} does not cut microbatches; use slices=1, or terapipe")
    if name == "ampnet":
        options |= asynchronous
    elif asynchronous:
        raise ValueError(f"{', '.join(asynchronous)} is for ampnet; leave it out for {name}")
    return _MAKERS[name](ranks, microbatches, **options)
