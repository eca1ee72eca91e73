from edgemoe.cli import main

main()
