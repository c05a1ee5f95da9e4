"""One rank's process: entry point, main loop, leader and follower."""
