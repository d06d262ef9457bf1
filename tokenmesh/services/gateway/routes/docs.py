"""GET /docs and /redoc: the API's pages, with local scripts and styles."""

from importlib.resources import files
from pathlib import Path
from typing import Final

import fastapi_offline
from fastapi import APIRouter
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import FileResponse, HTMLResponse

from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.errors import NotFound

_STATIC: Final = Path(str(files(fastapi_offline))) / "static"
_NAMES: Final = frozenset(file.name for file in _STATIC.iterdir())


def docs_router(gateway: Gateway) -> APIRouter:
    """The two pages and the files that they load."""
    router = APIRouter(include_in_schema=False)
    root = gateway.settings.root_path
    title, document, folder = "TokenMesh", f"{root}/openapi.json", f"{root}/docs"

    @router.get("/docs")
    async def swagger() -> HTMLResponse:
        return get_swagger_ui_html(
            title=title,
            openapi_url=document,
            swagger_js_url=f"{folder}/swagger-ui-bundle.js",
            swagger_css_url=f"{folder}/swagger-ui.css",
            swagger_favicon_url=f"{folder}/favicon.png",
        )

    @router.get("/redoc")
    async def redoc() -> HTMLResponse:
        return get_redoc_html(
            title=title,
            openapi_url=document,
            redoc_js_url=f"{folder}/redoc.standalone.js",
            redoc_favicon_url=f"{folder}/favicon.png",
            with_google_fonts=False,
        )

    @router.get("/docs/{name}")
    async def file(name: str) -> FileResponse:
        if name not in _NAMES:
            raise NotFound(f"no file {name[:80]!r}")
        return FileResponse(_STATIC / name)

    return router
