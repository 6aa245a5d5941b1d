"""`python -m allattn` and `deepspeed --module allattn`."""

import sys

from allattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
