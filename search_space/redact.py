"""What must never reach a record or a log: passwords in addresses, tokens, values of secret variables."""

from __future__ import annotations

from collections.abc import Mapping
import os
from pathlib import Path
import re
from typing import Any
from urllib.parse import quote
from urllib.parse import unquote
from urllib.parse import urlsplit


HIDDEN = "***"
"""What stands where a secret stood."""

SHORTEST = 8
"""Shorter values of secret variables are not searched for in texts: they would blacken every second word."""

WORDS = (
    r"(?:password|passwd|passphrase|pwd|token|secret|credential|credentials|authorization|"
    r"api[_-]?key|apikey|access[_-]?key|private[_-]?key|secret[_-]?key|account[_-]?key|dsn)"
)
_FOLDERS = ("PWD", "OLDPWD")
"""What shells call the working folder; no password."""

_SECRET_NAME = re.compile(rf"(?:^|[^a-z0-9]){WORDS}(?:$|[^a-z0-9])", re.IGNORECASE)
_HARMLESS = re.compile(r"(?:_|-)(?:file|path|dir|id|name|mode|type|count|expiry)$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_RULES = (
    # Addresses: scheme://user:password@host. Greedy up to the last @ before the path, as parsers read it.
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@'\"]*):[^\s/'\"]*@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"\b((?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    # name=value, name: value, --name value; a quoted value up to its quote.
    (
        re.compile(
            rf"((?:--?|\b)(?:[A-Za-z0-9]+[_-])*{WORDS}(?:[_-][A-Za-z0-9]+)*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&\"']+|\S+)",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"(--(?:[a-z0-9]+-)*{WORDS}\s+)(?!-)\S+", re.IGNORECASE), rf"\1{HIDDEN}"),
    # Shapes that issuers give their tokens.
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|"
            r"sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|AIza[\w-]{30,}|"
            r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
        ),
        HIDDEN,
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), HIDDEN),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret: ``HF_TOKEN`` does, ``tokens_per_step`` not."""
    if name in _FOLDERS:
        return False
    plain = _CAMEL.sub("_", name) if not name.isupper() else name
    return bool(_SECRET_NAME.search(plain)) and not _HARMLESS.search(plain)


def known_secrets(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Secret values that this process was given: secret variables, passwords inside addresses, Ray's token.

    Args:
        environment: variables; None for this process's own.
    """
    environment = os.environ if environment is None else environment
    found: set[str] = set()
    for name, value in environment.items():
        if is_secret_name(name):
            found.add(value)
        elif "://" in value:
            found |= _passwords(value)
    token = environment.get("RAY_AUTH_TOKEN_PATH") or str(Path(environment.get("HOME", "/")) / ".ray" / "auth_token")
    found.add(_small_text(token))
    return tuple(sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True))


def redact(text: str, secrets: tuple[str, ...] | None = None) -> str:
    """A text without its secrets.

    Args:
        text: any text.
        secrets: values to hide wherever they stand; None for :func:`known_secrets`.
    """
    for secret in known_secrets() if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_value(value: Any, secrets: tuple[str, ...] | None = None) -> Any:
    """A JSON-like value without its secrets: texts redacted, texts under a secret's name hidden whole.

    Args:
        value: dicts, lists, tuples, texts, numbers; keys of dicts are kept.
        secrets: values to hide wherever they stand; None for :func:`known_secrets`.
    """
    secrets = known_secrets() if secrets is None else secrets
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(inner, str) and inner and is_secret_name(str(key))
            else redact_value(inner, secrets)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(redact_value(inner, secrets) for inner in value) if type(value) in (list, tuple) else value
    return value


def redact_argv(argv: list[str]) -> list[str]:
    """A command line without secrets: an option's value that stands as an argument of its own goes too."""
    secrets = known_secrets()
    shown, hide = [], False
    for argument in argv:
        name, equals, value = argument.partition("=")
        secret = argument.startswith("-") and is_secret_name(name.lstrip("-"))
        shown.append(HIDDEN if hide else f"{name}={HIDDEN}" if secret and value else redact(argument, secrets))
        hide = secret and not equals
    return shown


def without_password(address: str) -> str:
    """An address as it may be written down: the user's name stays, the password goes."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return redact(address)
    if "@" not in parts.netloc:
        return address
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return parts._replace(netloc=f"{name}@{host}" if name else host).geturl()


def password_of(address: str) -> tuple[str | None, str | None]:
    """User and password inside an address, decoded; None where absent."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return None, None
    if "@" not in parts.netloc:
        return None, None
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    return unquote(user) or None, unquote(password) if colon else None


def _passwords(address: str) -> set[str]:
    password = password_of(address)[1]
    return {password, quote(password, safe="")} if password else set()


def _small_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""
