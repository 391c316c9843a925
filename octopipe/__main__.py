"""`python -m octopipe` is the `octopipe` command."""

import sys

from octopipe.cli import main

sys.exit(main())
