# Creates, rewrites, renames, links and removes files and directories of the current directory until $S/../stop exists.
# $SEED is a number that decides what. No single quotes: it is passed within them.
RANDOM=$SEED; until test -e $S/../stop; do
  d=d$((RANDOM % 4)); e=d$((RANDOM % 4)); f=f$((RANDOM % 6)); g=f$((RANDOM % 6))
  case $((RANDOM % 13)) in
    0|1|2) mkdir -p $d; head -c $((RANDOM * 3)) /dev/urandom > $d/$f;;
    3) test -f $d/$f && printf x >> $d/$f;;
    4) mv -f $d/$f $e/$g 2>/dev/null;;
    5) rm -f $d/$f;;
    6) mv -T $d $e 2>/dev/null || mv -T $d m$RANDOM 2>/dev/null;;
    7) ln $d/$f $e/$g 2>/dev/null;;
    8) rm -rf m* 2>/dev/null;;
    9) test -e $d/$f && chmod $((RANDOM % 2 ? 600 : 644)) $d/$f;;
    10) ln -sfn $f $d/l 2>/dev/null;;
    11) test -f $d/$f && cat $d/$f >/dev/null;;
    12) test -e $d/$f && touch -d @$RANDOM $d/$f;;
  esac; done 2>/dev/null; true
