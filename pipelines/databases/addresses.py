"""Addresses of database servers: taking the password out, and putting one in that an environment variable holds."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pipelines.errors import DataError, ResourceError
from pipelines.registry import DIALECTS

NO_SECRETS = ("password", "passfile")  # options of an address: the first is taken out of it, the other names a file
HINT = "It looks like postgresql://reader@host:5432/shop or mysql://reader@host/shop."


def parted(address: str) -> tuple[str, str | None]:
    """An address without its password, and the password.

    Raises:
        DataError: this is no address; what it says is not quoted, for it may hold a password.
    """
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:
        raise DataError("this is no address of a database server", HINT) from None
    if not parts.path.strip("/"):
        raise DataError("the address names no database", HINT)
    options = parse_qsl(parts.query, keep_blank_values=True)
    if secret := next((key for key, _ in options if "pass" in key.lower() and key not in NO_SECRETS), None):
        raise DataError(f"the address holds a secret, {secret}", "Leave it out: use a key without a passphrase.")
    password = next((value for key, value in options if key == "password"), None)
    query = urlencode([(key, value) for key, value in options if key != "password"], quote_via=quote)
    user, _, written = parts.netloc.rpartition("@")[0].partition(":")
    host = parts.netloc.rpartition("@")[2]
    bare = parts._replace(netloc=f"{user}@{host}" if user else host, query=query).geturl()
    return bare, unquote(written) if written else password


def complete(address: str, engine: str, password: str | None) -> str:
    """The address that a driver gets: with the password, which then is in this process's memory alone."""
    try:
        DIALECTS[engine].check_address(address)
    except ValueError as error:
        raise DataError(str(error), HINT) from None
    if password is None:
        return address
    try:
        return DIALECTS[engine].with_password(address, password)
    except ValueError as error:
        raise DataError(str(error), HINT) from None


def password_of(engine: str, variable: str | None) -> str | None:
    """The password in an environment variable; None where none is to be had.

    Raises:
        ResourceError: the card names a variable that is not set.
    """
    if variable is None:
        return os.environ.get(DIALECTS[engine].password_variable)
    password = os.environ.get(variable)
    if password is None:
        raise ResourceError(f"the environment variable {variable} is not set", "It holds the database's password.")
    return password


def name_of(address: str) -> str:
    """A short name for a database: the last part of its address, made of letters, digits and `_`."""
    last = unquote(urlsplit(address).path).rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"\W+", "_", last).strip("_").lower() or "database"


def reason(error: Exception) -> str:
    """Why a server could not be used, in a few plain words; a driver's own text may hold more than a user may see."""
    message = str(error).lower()
    reasons = {
        ("password", "1045", "access denied"): "the server refuses this user or password",
        ("no such file", "unable to open"): "there is no such file",
        ("does not exist", "unknown database", "1049"): "the server has no such database or user",
        (
            "refused",
            "resolve",
            "timeout",
            "timed out",
            "not known",
            "unreachable",
            "2003",
        ): "the server does not answer",
        (
            "not a database",
            "not a valid duckdb",
            "no duckdb",
            "could not read",
            "file is encrypted",
        ): "it is no database",
        ("lock",): "another process writes to it",
    }
    return next(
        (words for marks, words in reasons.items() if any(mark in message for mark in marks)), type(error).__name__
    )
