"""`python -m trainer run.yaml`: see `trainer.main`."""

from trainer.main import main

if __name__ == "__main__":
    main()
