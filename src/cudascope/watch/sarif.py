"""Findings as SARIF 2.1.0 (OASIS), which code hosts and editors show beside the lines."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from cudascope.watch.findings import Finding

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_log(findings: Sequence[Finding], summaries: dict[str, str]) -> dict:
    """A SARIF log of one run. `summaries`: by the name of each rule there is, what it says."""
    names = list(summaries)
    rules = [
        {"id": _id(name), "name": _camel(name), "shortDescription": {"text": summary}}
        for name, summary in summaries.items()
    ]
    results = [
        {
            "ruleId": _id(found.rule),
            "ruleIndex": names.index(found.rule),
            "level": "error",
            "message": {"text": f"{found.kernel}: {found.sentence}"},
            "locations": [_location(found.file, found.line)],
            "relatedLocations": [_location(found.other_file, found.other_line, "the other thread")]
            if found.other_line
            else [],
            "occurrenceCount": found.count,
        }
        for found in findings
    ]
    driver = {"name": "cudascope", "rules": rules}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _location(file: str, line: int, message: str = "") -> dict:
    physical: dict = {"artifactLocation": {"uri": uri(file)}}
    if line:
        physical["region"] = {"startLine": line}
    return {"physicalLocation": physical} | ({"message": {"text": message}} if message else {})


def uri(file: str) -> str:
    """Relative to the current folder where the file lies in it, as code hosts want it."""
    path = Path(file).absolute()
    if path.is_relative_to(Path.cwd()):
        return quote(os.fsencode(path.relative_to(Path.cwd())))
    return path.as_uri()


def _id(name: str) -> str:
    return name.replace(" ", "-")


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split())
