"""Uploads an export to a hub, where there is a token for it."""

from __future__ import annotations

from pathlib import Path

from pipelines.errors import EndpointError, ResourceError, UserError

HINT = "Set HF_TOKEN, or run: hf auth login"


def require_token() -> str:
    """The token of the hub.

    Raises:
        ResourceError: there is none.
    """
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise ResourceError("there is no token for the hub", HINT)
    return token


def push(folder: Path, name: str, token: str) -> str:
    """Upload a folder into a repository of that name, made private where there is none; returns its address.

    Raises:
        UserError: the hub refuses the token or the name.
        EndpointError: the hub does not answer.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model of sqltrain")
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name of a repository: {_line(error)}", "Write OWNER/NAME.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(f"the hub refuses the token ({status})", "It needs the right to write; " + HINT) from None
        raise EndpointError(f"the hub answers {status}: {_line(error)}") from None
    except (httpx.HTTPError, OSError) as error:
        raise EndpointError(f"the hub cannot be reached: {_line(error)}") from None
    return str(url)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
