"""`python -m mpicoll`: the command line."""

from mpicoll.cli.main import main

if __name__ == "__main__":
    main()
