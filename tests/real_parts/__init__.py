"""Real parts that tests run against, each with a class that starts and stops it."""
