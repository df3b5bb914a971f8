"""What a page says of the experiments of a sweep: tables, figures, claims, runs, and the leaderboard."""
