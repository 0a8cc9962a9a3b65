#!/bin/bash
echo mountain >> park.txt
