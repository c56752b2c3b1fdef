"""Plans on the dashboard: as tables, and as pictures that a process of their own draws.

    explainer.py ──▸ plans.py                              (tables, on a few threads)
         └──▸ picture_process.py ──▸ picture_program.py    (one picture at a time)

`picture_program` draws with `heliograph.explain`, which is all that the dashboard uses of the
client.
"""
