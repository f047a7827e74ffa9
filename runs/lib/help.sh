# Sourced first by the other scripts: with --help a script prints the comment at its head, and does nothing else.
if [[ " $* " == *" --help "* ]]; then
  sed -n '2,/^[^#]/{/^#SBATCH/d; s/^# \{0,1\}//p;}' "$0"
  exit
fi
