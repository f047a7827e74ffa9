"""What runs/chat.py and runs/page.py share as clients of servers that speak OpenAI's protocol."""

import os
from urllib.parse import urlsplit

import openai
from lib.command import RunError


def client_options(url: str) -> dict:
    """Options of openai.OpenAI for a server; the address may end with /v1. Raises: RunError"""
    base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise RunError(f"{url!r} does not begin with http:// or https://; try http://127.0.0.1:8000")
    try:
        urlsplit(base).port  # noqa: B018  (a ValueError if it is not a number)
    except ValueError as error:
        raise RunError(f"{url} is not a web address ({error}); try http://127.0.0.1:8000") from None
    return {"base_url": f"{base}/v1", "api_key": os.environ.get("OPENAI_API_KEY") or "none", "max_retries": 0}


def error_message(error: Exception) -> str:
    """What went wrong, in the server's own words where it has some."""
    if isinstance(error, openai.APIConnectionError):
        return f"cannot reach {error.request.url} ({error.__cause__ or error}); is the server running?"
    if not isinstance(error, openai.APIError):
        return str(error)
    message = isinstance(error.body, dict) and error.body.get("message")
    if not isinstance(error, openai.APIStatusError):
        return f"the server stopped: {message or error.message}"
    way = "; set the environment variable OPENAI_API_KEY to its key" if error.status_code == 401 else ""
    return f"the server answered {error.status_code}: {(message or error.response.text)[:500]}{way}"


def is_context_full(error: Exception) -> bool:
    """Whether a conversation does not fit: some servers say it in the code, others in the message alone."""
    return isinstance(error, openai.BadRequestError) and "context" in f"{error.code} {error_message(error)}".lower()
