"""Generate text from a shell, piece by piece: python -m pagewise.engine "prompt…" (lesson 9).

With several processes: torchrun --nproc-per-node 2 -m pagewise.engine "prompt…", or --tensor-parallel 2.
"""

import argparse
import sys
from collections.abc import Sequence

from pagewise.engine.command_line import Parser, add_engine_options, add_fields, engine_config, given_fields
from pagewise.engine.leader import GroupLost
from pagewise.engine.llm import LLM
from pagewise.engine.sampling_params import SamplingParams
from pagewise.models.load import TINY

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
SAMPLING = (
    ("max_tokens", int, "tokens to generate at most"),
    ("min_tokens", int, "tokens before it may end"),
    ("temperature", float, "0: the likeliest token each time"),
    ("top_k", int, "of the N likeliest tokens; 0: of all"),
    ("top_p", float, "of the likeliest of this weight"),
    ("min_p", float, "of tokens of N times the best weight"),
    ("repetition_penalty", float, "for tokens met before"),
    ("presence_penalty", float, "for tokens generated before"),
    ("frequency_penalty", float, "for each time of these"),
    ("seed", int, "the same text each time"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit status 0. If the command cannot be done, print one line on stderr that says why, and return 2."""
    asked = _parser().parse_args(arguments)
    try:
        given, config = given_fields(SamplingParams, asked), engine_config(asked)
        SamplingParams(**given)  # a wrong value is refused before the model is loaded
        with LLM(asked.model, config) as llm:
            prompt = asked.prompt if llm.tokenizer is not None else _token_ids(asked.prompt)
            for piece in llm.stream(prompt, llm.sampling_params(**given)):
                print(piece, end="" if isinstance(piece, str) else " ", flush=True)
        print()
    except KeyboardInterrupt:
        print()
        return INTERRUPTED
    except (GroupLost, ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _token_ids(text: str) -> list[int]:
    """Return the prompt for a checkpoint without a tokenizer."""
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(f"the checkpoint has no tokenizer: the prompt must be token ids, got {text!r}") from None


def _parser() -> argparse.ArgumentParser:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(prog="python -m pagewise.engine", description="Continue a prompt.", formatter_class=shown)
    parser.add_argument("prompt", help="a text, or token ids if the checkpoint has no tokenizer")
    parser.add_argument("--model", default=TINY, help="a folder or a hub id")
    add_fields(parser, SAMPLING, {"max_tokens": 64})
    several = {"action": "append", "default": [], "help": "ends the text; may come again"}
    parser.add_argument("--stop", metavar="TEXT", **several)
    parser.add_argument("--stop-token-ids", type=int, metavar="N", **several)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
