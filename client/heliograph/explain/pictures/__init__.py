"""Pictures of plans: pure layout and drawing, over what `model` describes.

`scene.scene_of(Picture)` lays a plan out once. `drawing.svg_text` draws it as SVG, and `page.page`
as a page. A page of another program takes `page.view` for the markup of a view, `page.view_data`
for its data, and once `page.heads`, `page.script_text` and `drawing.style`. Nothing here imports
more of the client than `explain.parts`, which are plain values.
"""
