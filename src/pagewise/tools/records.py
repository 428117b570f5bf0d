"""What was measured, written down so that it can be trusted later (lessons/measurements/*.json).

A file is a JSON list with a record per line. Each stands for itself: what ran, on what, when, with which versions, and
how near it came to a limit that was measured on the same machine. A record that was edited by hand, or that contradicts
itself, is noticed when it is read.
"""

import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch


class Record(NamedTuple):
    """One thing measured once, or the reason why it could not be."""

    what: str
    shape: dict[str, int]
    dtype: str
    device: str
    driver: str | None
    versions: dict[str, str | None]
    date: str  # ISO 8601
    commit: str | None
    how: str  # the conditions: "cold L2, launch hidden, 30 calls"
    bytes: int  # that had to be moved
    flops: int  # that had to be done
    limit: Literal["copy", "matmul"]  # which of the two is held against a measured rate
    limit_rate: float | None  # that rate: a copy's bytes, or a matrix product's FLOPs, per second
    seconds: float | None = None  # the median
    spread: float | None = None  # seconds between the quartiles
    fraction: float | None = None  # of limit_rate
    refused: str | None = None  # why there is no time

    @property
    def subject(self) -> tuple:
        """What a newer record replaces: the same thing on the same device."""
        return self.what, tuple(self.shape.items()), self.dtype, self.device

    def reached(self) -> float | None:
        """The fraction that time, bytes or FLOPs, and the measured rate give."""
        if self.seconds is None or self.limit_rate is None:
            return None
        return (self.bytes if self.limit == "copy" else self.flops) / self.seconds / self.limit_rate


def surroundings(device: torch.device) -> dict[str, Any]:
    """The part of a record that is the same for all of one run: device, driver, versions, date, commit."""
    on_gpu = device.type == "cuda"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {name: _version(name) for name in ("pagewise", "torch", "triton", "numpy", "cuda-core")}
    folder = str(Path(__file__).parent)
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"),
    }


def keep(path: Path, record: Record) -> None:
    """Add a record to a file, in the place of an older one of the same thing on the same device.

    The file is replaced at once: whoever stops a run half-way has all that was kept before.

    Raises:
        ValueError: the record, or one that the file holds, is not valid.
    """
    entry = _entry(record)
    _record(entry)
    records = {old.subject: old for old in recorded(path) or []}
    records[record.subject] = record
    lines = ",\n".join(json.dumps(_entry(one), ensure_ascii=False) for one in records.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(partial, path)


def recorded(path: Path) -> list[Record] | None:
    """The records that `keep` wrote, or None where nothing was recorded yet.

    Raises:
        ValueError: one was not written by `keep`, or was changed since; the message says which, and what is wrong.
    """
    if not path.exists():
        return None
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); measure again") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of records, got {type(entries).__name__}; measure again")
    records = []
    for number, entry in enumerate(entries, start=1):
        try:
            records.append(_record(entry))
        except ValueError as error:
            raise ValueError(f"{path}, record {number}: {error}; measure it again") from None
    return records


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under a header: numbers flush right, the first and the last column flush left."""
    widths = [*(max(map(len, column)) for column in zip(header, *rows, strict=True))][:-1]
    lines = []
    for first, *numbers, last in (header, *rows):
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded, last]))
    return "\n".join(lines)


def table_of(records: Sequence[Record]) -> str:
    """A table per shape and dtype: each thing's time, its spread, its rate, and its share of the measured limit."""
    tables = []
    for (shape, dtype), group in itertools.groupby(records, lambda record: (record.shape, record.dtype)):
        sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
        header = (f"{sizes}, {dtype}", "time", "spread", "rate", "of limit", "how")
        tables.append(table(header, [_row(record) for record in group]))
    return "\n\n".join(tables)


def _row(r: Record) -> tuple[str, ...]:
    if r.seconds is None:
        return r.what, "–", "–", "–", "–", r.refused
    amount, unit = (r.bytes, "GB/s") if r.limit == "copy" else (r.flops, "GFLOP/s")
    fraction = "–" if r.fraction is None else f"{r.fraction:.1%} {r.limit}"
    rate = f"{amount / r.seconds / 1e9:,.1f} {unit}"
    return r.what, f"{r.seconds * 1e6:,.1f} µs", f"{r.spread / r.seconds:.1%}", rate, fraction, r.how


# ------------------------------------------------------------------------------------------------ validation


def _entry(record: Record) -> dict[str, Any]:
    """The record as it is written, with a digest of all its fields."""
    return {**record._asdict(), "digest": _digest(record._asdict())}


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _record(entry: object) -> Record:
    """A record from what was written: all fields there, of their types, as they were, in agreement with each other."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must be an object, got {type(entry).__name__}")
    hints = get_type_hints(Record)
    fields = {name: value for name, value in entry.items() if name != "digest"}
    if missing := [name for name in (*hints, "digest") if name not in entry]:
        raise ValueError(f"{', '.join(missing)} missing")
    if unknown := [name for name in fields if name not in hints]:
        raise ValueError(f"{', '.join(unknown)} unknown")
    for name, hint in hints.items():
        if not _fits(fields[name], hint):
            raise ValueError(f"{name} must be {getattr(hint, '__name__', hint)}, got {fields[name]!r}")
    if entry["digest"] != _digest(fields):
        raise ValueError("its digest does not fit: it was changed by hand")
    record = Record(**fields)
    _check_agreement(record)
    return record


def _fits(value: object, hint: Any) -> bool:
    """Whether what JSON gave is of the annotated type. A bool is no number here, and a float is finite."""
    if get_origin(hint) is dict:
        key, item = get_args(hint)
        return isinstance(value, dict) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _check_agreement(record: Record) -> None:
    """What a record says twice must agree."""
    try:
        datetime.datetime.fromisoformat(record.date)
    except ValueError:
        raise ValueError(f"date must be in ISO 8601, got {record.date!r}") from None
    timed = record.seconds is not None
    if timed == (record.refused is not None) or timed != (record.spread is not None):
        raise ValueError("it must have seconds and a spread, or the reason (refused) why not")
    if timed and not (record.seconds > 0 and record.spread >= 0):
        raise ValueError(f"seconds must be above 0 and spread at least 0, got {record.seconds} and {record.spread}")
    if record.limit_rate is not None and record.limit_rate <= 0:
        raise ValueError(f"limit_rate must be above 0, got {record.limit_rate}")
    reached = record.reached()
    agrees = record.fraction is None if reached is None else math.isclose(record.fraction or 0.0, reached, rel_tol=1e-6)
    if not agrees:
        raise ValueError(f"fraction must be {reached}, which its time, work and limit_rate give, got {record.fraction}")


# ------------------------------------------------------------------------------------------------ surroundings


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The first line that a command prints, or None where there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [None])[0]
