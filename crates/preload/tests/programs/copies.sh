cd "$1" || exit 1
mkdir -p s/d; for i in 1 2 3; do seq 1 $((i * 1000)) > s/d/$i; done; ln -s d/1 s/l; ln s/d/1 s/h; touch -d @100 s/d/*; chmod 640 s/d/3
rsync -aH s/ t/; diff -r s t && echo same; stat -c '%Y %a %h' t/d/2 t/d/3 t/h; echo more >> s/d/2; rm s/d/3; touch -d @300 s/d; rsync -aH --delete --itemize-changes s/ t/; diff -r s t && echo same; rsync -a --checksum --dry-run s/ t/; echo $?
rsync -a --inplace --no-whole-file s/d/1 t/d/2; cmp s/d/1 t/d/2 && echo inplace; cp -al s hard; stat -c %h hard/d/1; cp -r --preserve=timestamps s/d copy; stat -c %Y copy/1 | wc -l; cp -u s/d/1 copy/1; cp --backup=numbered s/d/2 copy/1; ls copy
d=$(mktemp -d /tmp/forebay-copies-XXXXXX); cp -a s "$d/"; diff -r s "$d/s" && echo out; mv s "$d/moved"; ls; mv "$d/moved" back; diff -r back "$d/s" && echo in; ln -s "$1/back" "$d/link"; ls "$d/link/d"; cat "$d/link/l" | wc -l; echo through > "$d/link/new"; cat back/new; rsync -a "$d/s/" r/; rm -rf "$d"; ls r
