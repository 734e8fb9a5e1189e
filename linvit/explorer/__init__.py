"""A page in the browser that shows what attention computes on the user's own image: served and written."""

from linvit.explorer.serving import Explorer as Explorer
from linvit.explorer.serving import explore as explore
