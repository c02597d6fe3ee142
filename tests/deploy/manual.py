"""The manuals' blocks of code: what a reader would paste."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPERATING = ROOT / "docs/OPERATING.md"


def blocks(text):
    """Every block of code, with the heading that it lies under: [(heading, text)]. Indented ones, and those between ```."""
    heading, result, block, fenced = "", [], [], False

    def end():
        nonlocal block
        if block:
            result.append((heading, "\n".join(block).strip("\n")))
        block = []

    for line in text.splitlines():
        if line.startswith("```"):
            end()
            fenced = not fenced
        elif fenced:
            block.append(line)
        elif line.startswith("    "):
            block.append(line[4:])
        elif line.strip() == "" and block:
            block.append("")
        else:
            end()
            heading = re.sub(r"^#+ ", "", line) if line.startswith("#") else heading
    end()
    return result


def block(heading, word):
    """The one of OPERATING.md under that heading that has the word."""
    found = [text for name, text in blocks(OPERATING.read_text()) if name == heading and word in text]
    assert len(found) == 1, f"{len(found)} blocks under {heading} have {word}, wanted 1"
    return found[0]
