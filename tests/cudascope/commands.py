"""Runs the command `cudascope` for test_programs.py, many times in one process.

    python commands.py        each line of standard input is a list of arguments; each line of the output is an answer

A process for each command, which begins with nothing in its memory, takes five times as long.
"""

import json
import os
import sys
import tempfile

from cudascope.command.line import main


def answer(arguments: list[str]) -> dict[str, object]:
    """The status and the outputs of the command."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            status = main(arguments)
        except SystemExit as ended:  # argparse cannot read an option
            status = ended.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            os.close(kept[0])
            os.close(kept[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return {"status": status, "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
