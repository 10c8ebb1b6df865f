"""The steps of the user's loop under a plan: run, watched, planned anew if they differ (P7, P8)."""
