"""An asyncio web service in front of a daemon: many requests share one session and one plan.

pip install starlette uvicorn
heliograph serve                                      # in a terminal of its own
HELIOGRAPH_SERVER=grpc://127.0.0.1:7070 uvicorn web_service:app
curl -d '{"x": [1, 2, 3]}' http://127.0.0.1:8000/softmax
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import heliograph as hg

SIZE = 3


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Connect and compile once, when the service starts."""
    graph = hg.Graph()
    graph.output("y", hg.softmax(graph.input("x", (SIZE,), "f32"), axis=-1))
    async with hg.aio.connect(os.environ.get("HELIOGRAPH_SERVER", "local:")) as session:
        app.state.plan = await session.compile(graph)
        yield


async def softmax(request: Request) -> JSONResponse:
    """Answer POST {"x": [three numbers]} with {"y": [...]}."""
    try:
        x = np.asarray((await request.json())["x"], np.float32)
        outputs = await request.app.state.plan.run(x=x, timeout=5)
    except (KeyError, TypeError, ValueError, hg.InvalidArgumentError, hg.InvalidInputError) as error:
        return JSONResponse({"error": str(error)}, 400)
    except hg.HeliographError as error:  # the daemon is gone, or the deadline has passed
        return JSONResponse({"error": error.message}, 503)
    return JSONResponse({"y": outputs["y"].tolist()})


app = Starlette(routes=[Route("/softmax", softmax, methods=["POST"])], lifespan=lifespan)
