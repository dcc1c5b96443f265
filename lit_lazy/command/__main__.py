"""`python -m lit_lazy.command` is `lit-lazy`."""

import sys

from lit_lazy.command.main import main

sys.exit(main())
