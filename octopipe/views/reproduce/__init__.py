"""The paper's tables and figures made again with our own code: ours beside theirs.

Knows: the room's face. Does not know: any one table. `octopipe reproduce` is its verb.

    reading.py, models.py   what the paper leaves open and how we read it; its models and the authors' layer times
    row.py, part.py         a claim with its verdict; a table or figure
    bench.py, runner.py     costs, baselines, searches kept on disk; parts run, kept and written
    parts/                  one file per table or figure
"""
