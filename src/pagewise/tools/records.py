"""Keep measurements in files so that they can be trusted later (lessons/measurements/*.json).

A file is a JSON list with one record per line. A record names the function, device, date and versions, and compares the
time with a limit that was measured on the same machine. A record that was edited by hand, or that contradicts itself,
raises an error when it is read.
"""

import datetime
import hashlib
import itertools
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch


class Record(NamedTuple):
    """One measurement, or the reason why a function could not be measured."""

    what: str
    shape: dict[str, int]
    dtype: str
    device: str
    driver: str | None
    versions: dict[str, str | None]
    date: str  # ISO 8601
    commit: str | None
    how: str  # the conditions: "cold L2, launch hidden, 30 calls"
    bytes: int  # the bytes that must be moved
    flops: int  # the floating-point operations that must be done
    limit: Literal["copy", "matmul"]  # the measured rate that limits this work
    limit_rate: float | None  # the bytes of a copy, or the FLOPs of a matrix product, per second
    seconds: float | None = None  # the median
    spread: float | None = None  # seconds between the quartiles
    refused: str | None = None  # why there is no time

    @property
    def subject(self) -> tuple:
        """The key of a record. A newer record with the same key replaces it."""
        return self.what, tuple(self.shape.items()), self.dtype, self.device

    @property
    def fraction(self) -> float | None:
        """The fraction of limit_rate that was reached, or None without a time or a rate."""
        if self.seconds is None or self.limit_rate is None:
            return None
        return (self.bytes if self.limit == "copy" else self.flops) / self.seconds / self.limit_rate


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return the fields that all records of a run share: device, driver, versions, date, commit."""
    on_gpu = device.type == "cuda"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {"pagewise": _version("attention-page-by-page")}
    versions |= {name: _version(name) for name in ("torch", "triton", "numpy", "cuda-core")}
    folder = str(Path(__file__).parent)
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"),
    }


def keep(path: Path, record: Record) -> None:
    """Add a record to a file. It replaces an older record with the same `subject`.

    The file is replaced in one step, so that a run that is stopped keeps all earlier records.

    Raises:
        ValueError: the record, or one that the file holds, is not valid.
    """
    _record(_entry(record))
    records = {old.subject: old for old in recorded(path) or []}
    records[record.subject] = record
    lines = ",\n".join(json.dumps(_entry(one), ensure_ascii=False) for one in records.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(partial, path)


def recorded(path: Path) -> list[Record] | None:
    """Return the records that `keep` wrote, or None if the file does not exist.

    Raises:
        ValueError: a record was not written by `keep`, or was changed since. The message names it and the fault.
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
    """Format rows of text under a header. Numbers are aligned right, the first and the last column left."""
    widths = [*(max(map(len, column)) for column in zip(header, *rows, strict=True))][:-1]
    lines = []
    for first, *numbers, last in (header, *rows):
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded, last]))
    return "\n".join(lines)


def table_of(records: Sequence[Record]) -> str:
    """Format a table per shape and dtype, with time, spread, rate and the fraction of the measured limit."""
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
    """Return the fields of a record as they are written, with a digest of all fields."""
    return {**record._asdict(), "digest": _digest(record._asdict())}


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def _record(entry: object) -> Record:
    """Return the record that was written. Its fields are complete and unchanged, and do not contradict each other."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must be an object, got {type(entry).__name__}")
    fields = {name: value for name, value in entry.items() if name != "digest"}
    if missing := [name for name in (*Record._fields, "digest") if name not in entry]:
        raise ValueError(f"{', '.join(missing)} missing")
    if unknown := [name for name in fields if name not in Record._fields]:
        raise ValueError(f"{', '.join(unknown)} unknown")
    if entry["digest"] != _digest(fields):
        raise ValueError("its digest does not fit: it was changed by hand")
    record = Record(**fields)
    _check_agreement(record)
    return record


def _check_agreement(record: Record) -> None:
    """Check that the fields of a record do not contradict each other."""
    datetime.datetime.fromisoformat(record.date)  # raises ValueError
    timed = record.seconds is not None
    if timed == (record.refused is not None) or timed != (record.spread is not None):
        raise ValueError("it must have seconds and a spread, or the reason (refused) why not")
    if timed and not (record.seconds > 0 and record.spread >= 0):
        raise ValueError(f"seconds must be above 0 and spread at least 0, got {record.seconds} and {record.spread}")
    if record.limit_rate is not None and record.limit_rate <= 0:
        raise ValueError(f"limit_rate must be above 0, got {record.limit_rate}")


# ------------------------------------------------------------------------------------------------ surroundings


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return the first line that a command prints, or None if the command does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [None])[0]
