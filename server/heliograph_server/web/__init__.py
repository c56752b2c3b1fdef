"""The dashboard in the browser: `heliograph serve --web`.

    hub.py ──▸ facts.py             (the host's state to tables, on a thread)
      │   └──▸ run_tap.py ──▸ timeline.py   (ended runs to bars, pure)
      │   └──▸ history.py                   (ten minutes of figures, pure)
    app.py ──▸ sign_in.py, guard.py         (who is there, and may it; pure)
      ├──▸ explaining/                      (plans as tables and pictures)
      └──▸ page/                            (the files that the browser gets)

Nothing is collected while no page is open. One collection serves all viewers with the same rights.
"""
