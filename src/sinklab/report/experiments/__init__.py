"""The experiments of a sweep on the page: tables, figures, claims, runs, and the leaderboard."""
