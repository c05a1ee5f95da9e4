"""The parts that tests share: ranks as threads and processes, fakes, test cases."""
