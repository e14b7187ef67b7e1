"""The prompts of a command: given as words, one per line of a file, or on stdin."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rebased.files import parse_json

MAX_BYTES = 2**28  # of a file of prompts, or of stdin


def collect_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of --prompt, or of --file, or the text on stdin; in a terminal without any of them, an empty one."""
    if given and file is not None:
        raise ValueError("give --prompt or --file, not both")
    if file is not None:
        return read_prompt_file(file)
    if given:
        return list(given)
    if sys.stdin is None or sys.stdin.isatty():
        return [""]
    return [_decode(sys.stdin.buffer.read(MAX_BYTES + 1), "stdin").removesuffix("\n")]


def read_prompt_file(path: Path) -> list[str]:
    """One prompt per line that is not blank; in a .jsonl file one JSON object per line, {"prompt": "..."}."""
    with open(path, "rb") as stream:
        text = _decode(stream.read(MAX_BYTES + 1), str(path))
    is_json = path.suffix in (".jsonl", ".ndjson")
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.strip():
            prompts.append(_from_json(line, f"{path}, line {number}") if is_json else line)
    if not prompts:
        raise ValueError(f"{path} has no prompts; write one per line")
    return prompts


def _from_json(line: str, where: str) -> str:
    found = parse_json(line, where)
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise ValueError(f'{where} should be an object with a text, such as {{"prompt": "def main("}}')
    return found["prompt"]


def _decode(content: bytes, where: str) -> str:
    if len(content) > MAX_BYTES:
        raise ValueError(f"{where} has more than {MAX_BYTES:,} bytes; give a smaller text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{where}, line {line} is not UTF-8: {error.reason} at byte {error.start:,}") from error
