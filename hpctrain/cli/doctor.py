"""`hpctrain doctor`: the findings, one a line with its advice below."""

from __future__ import annotations

import argparse
import dataclasses
import json

from hpctrain.doctor import findings

SUMMARY = "what was found here, what will be used, and what to do about each shortfall"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 1 when training would fail."""
    mpi, facts = findings.mpi()
    found = [findings.python(), findings.processor(facts), *mpi, *findings.gpu(facts)]
    found += [findings.hdf5(), findings.slurm(), findings.modules(), findings.site()]
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=1))
    else:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            print(f"{finding.level:5}  {finding.name:{width}}  {finding.found}")
            if finding.advice:
                print(f"{'':5}  {'':{width}}  -> {finding.advice}")
    return int(any(finding.level == "error" for finding in found))
