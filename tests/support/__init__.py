"""What tests share: ranks as threads and processes, fakes, test cases."""
