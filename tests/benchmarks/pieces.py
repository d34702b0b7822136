"""Pieces of a campaign of measurements that succeed, and that fail in different ways."""

import os
import time

from benchmarks.accelerator.results import LeftOut, OutOfTime, Result


def good(out: Result) -> None:
    out.add(run="good", per_second=5.0)


def fails(out: Result) -> None:
    out.add(run="half")
    raise ValueError("two\nlines")


def left_out(out: Result) -> None:
    raise LeftOut("no such library")


def runs_out(out: Result) -> None:
    out.add(run="half")
    raise OutOfTime


def hangs(out: Result) -> None:
    out.add(run="half")
    time.sleep(600)


def every_row_fails(out: Result) -> None:
    for n in range(2):
        out.measure(lambda: 1 / 0, n=n)


def dies(out: Result) -> None:
    os.abort()
