"""Words of a shell script or a file of arguments, variables and arithmetic filled in, nothing run."""

from __future__ import annotations

from math import fmod
import re
import shlex

from search_space.errors import UserError


_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)$", re.S)
_ARRAY = re.compile(
    r"^\s*(?:(?:export|local|readonly|declare)\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\((.*)\)\s*;?\s*(?:#[^\n]*)?$", re.S
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()$]*)\)\)")
_ARITHMETIC = re.compile(r"^[\d\s+\-*/%()]+$")


def script(text: str) -> tuple[list[str], dict[str, str]]:
    """Every word of a script in order, and its variables as they were set last.

    Continued lines are joined, comments dropped, quotes taken off; ``NAME=value`` before its use fills ``$NAME``,
    ``${NAME}``, ``${NAME:-default}`` and ``$((a * b))`` in. Arrays ``ARGS=( … )`` give their words, of which one may
    hold a flag and its value; every branch of an ``if`` counts. A variable that nothing sets stays as it is written.

    Raises:
        UserError: a quote is not closed.
    """
    lines = [line for line in text.lstrip("\ufeff").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\r?\n", " ", "\n".join(line.rstrip() for line in lines).rstrip("\\\n "))
    joined = re.sub(r"\$\(\(([^()]*)\)\)", lambda match: "$((" + "".join(match[1].split()) + "))", joined)
    found: list[str] = []
    values: dict[str, str] = {}
    for chunk in _chunks(joined):
        array = _ARRAY.match(chunk)
        if array:
            found += _flat(_split(array[1]), values)
            continue
        assigned = _ASSIGNMENT.match(chunk.strip())
        if assigned and len(_split(chunk.strip().removeprefix("export "))) == 1:
            value = " ".join(_split(assigned[2])) if assigned[2] else ""
            values[assigned[1]] = _filled(value, values)
            # A string of flags, MODEL_ARGS="--num-layers 80 …", is as good as an array.
            if "--" in value:
                found += _flat(_split(value), values)
            continue
        found += _flat(_split(chunk), values)
    return found, values


def words(text: str) -> list[str]:
    """The words of :func:`script`."""
    return script(text)[0]


def _flat(parts: list[str], values: dict[str, str]) -> list[str]:
    """Words filled in; one that holds a flag and its value, ``"--fp8-format hybrid"``, becomes two."""
    found = []
    for part in parts:
        word = _filled(part, values)
        found += _split(word) if word.startswith("--") and re.search(r"\s", word) else [word]
    return found


def _chunks(text: str) -> list[str]:
    """Lines, those of an open quote or an open array joined; comments of their own are dropped."""
    chunks: list[str] = []
    open_lines: list[str] = []
    for line in text.splitlines():
        if not open_lines and line.lstrip().startswith("#"):
            continue
        open_lines.append(line)
        whole = "\n".join(open_lines)
        if _open_array(whole) or _open_quote(whole):
            continue
        chunks.append(whole)
        open_lines = []
    if open_lines:
        chunks.append("\n".join(open_lines))
    return chunks


def _open_array(text: str) -> bool:
    return bool(re.match(r"\s*(?:export\s+|declare\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\(", text)) and not re.search(
        r"\)\s*(?:#[^\n]*)?$", text
    )


def _open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"import: the script cannot be read ({error}) near {text.strip()[:60]!r}") from None


def _filled(word: str, values: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return values.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(4):
        before, word = word, _VARIABLE.sub(value, word)
        word = _SUM.sub(_computed, word)
        if word == before:
            break
    return word


def _computed(match: re.Match[str]) -> str:
    expression = match[1]
    if not _ARITHMETIC.match(expression) or "**" in expression or len(expression) > 200:
        return match[0]
    try:
        return str(_arithmetic(expression))
    except (ValueError, ZeroDivisionError):
        return match[0]


def _arithmetic(expression: str) -> int:
    """Whole numbers under + - * / %, products before sums."""
    tokens = re.findall(r"\d+|[+\-*/%]", expression)
    if re.sub(r"[\d\s+\-*/%]", "", expression) or not tokens:
        raise ValueError(expression)
    terms: list[int] = []
    sign, expect = 1, True
    operator = "+"
    for token in tokens:
        if token.isdigit():
            if not expect:
                raise ValueError(expression)
            number = int(token)
            if operator == "*":
                terms[-1] *= number
            elif operator == "/":
                terms[-1] = int(terms[-1] / number)
            elif operator == "%":
                terms[-1] = int(fmod(terms[-1], number))
            else:
                terms.append(sign * number)
            expect = False
        else:
            if expect:
                raise ValueError(expression)
            operator, expect = token, True
            sign = -1 if token == "-" else 1
    if expect:
        raise ValueError(expression)
    return sum(terms)
