"""Outputs that follow a grammar: compiled and followed by xgrammar in a process of its own.

A regular expression of twenty characters can keep xgrammar busy for minutes, and nothing interrupts
it there. In a process of its own it has a limit: who wrote the grammar gets an error, the engine
and all other requests go on.

    callers         --- compile(spec) ---> CompileQueue ---> main thread: compiles, caches
                                              ^ urgent
    engine's thread --- ask(sequences) ---> FollowQueue ---> follower: tokens in, a bit for each
                    <-- masks --------------'                that may come

The engine's thread waits a moment for masks, then steps without the rows that have none yet. The
process is a cache: a new one is told everything again, from the beginning, grammars first.
"""
