"""OpenAI's HTTP interface in front of a `Server`, as an ASGI application of Starlette.

app.py ──▸ endpoints.py ──▸ parameters.py (bodies to requests, pure)
                       └──▸ replies.py    (answers to JSON and events, pure)
"""

from heliograph.llm.serving.http.app import HttpSettings, make_app

__all__ = ["HttpSettings", "make_app"]
