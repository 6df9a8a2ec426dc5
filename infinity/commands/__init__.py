"""What the ``infinity`` command does, a module for each subject: plans, contents, waiting."""
