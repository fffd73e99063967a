"""`python -m runnerctl` is the `runnerctl` command."""

from runnerctl.cli.main import main

if __name__ == "__main__":
    main()
