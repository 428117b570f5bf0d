"""Observed and checked launches: contexts, findings, reports, and the least time on a GPU.

It imports cpu and the folders below cpu. Public: what cudascope exports of it (`check`, `observe`, `Finding` and so
on), report.Launch, instructions.Instructions, least_time.times and least_time.Work.
"""
