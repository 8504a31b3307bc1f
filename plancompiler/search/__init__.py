"""The search for the best layouts of a job, with a bound that proves how good they are."""
