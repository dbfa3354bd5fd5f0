"""What an episode is paid: one `Outcome`, many terms, one rubric."""
